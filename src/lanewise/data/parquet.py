"""A dataset of Parquet files."""

import logging
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, final

import numpy as np

from lanewise.data.archive import list_contents
from lanewise.data.block_reader import BlockReader
from lanewise.data.digest import digest
from lanewise.data.file_dataset import FileDataset, OnError, check_arguments
from lanewise.data.row_groups import ROWS_PER_CHUNK, Chunk, DamagedRowsError, RowGroups
from lanewise.data.rows import Rows
from lanewise.data.source_file import Paths

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)


@final
class ParquetDataset(FileDataset):
    """The rows of Parquet files, in the order of the files, each a dict from column to value.

        ParquetDataset("data/*.parquet", columns=["tokens", "label"])

    The footers, which are read at the start, tell where each row is. A row group is decoded from its start, a
    few hundred rows at a time, and a decoded row is kept until it was asked for. So an order that goes
    forward through each row group, as `blocked` does in many of them at a time, reads every byte once. Any
    other order gives the same rows, and takes much longer.

    `__getitems__` returns `Rows`, which collates without a Python object for each value.

    Args:
        paths: a path, a glob, or several; each local or an fsspec URL such as `s3://bucket/*.parquet`. The
            files of a glob are sorted by name; several paths stay in the order in which they are given. An
            archive stands for its files that end in .parquet, sorted by name and without hidden ones: a .tar
            is read as it is, a .zip or a compressed tar is unpacked once into `~/.cache/lanewise`.
        columns: the columns to read; all of the first file by default.
        memory_mib: how much memory decoded rows that were not asked for yet may take, in MiB, without the
            pages that are being decoded.
        on_error: what to do with rows that cannot be decoded. `raise` makes them an error; `skip` leaves them
            out, counts them in `num_skipped`, and names each row group once in the log.
        unpacked_gib: how much an archive that is unpacked may hold, in GiB; None stands for 100 times its
            own size, and at least 1.

    Raises:
        DataError: if there are no such files, one cannot be read as Parquet, lacks a column, or has another
            type for one than the first file, or if pyarrow is not installed.
    """

    reads_from_start = True

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        memory_mib: float = 256,
        on_error: OnError = "raise",
        unpacked_gib: float | None = None,
    ) -> None:
        check_arguments(on_error, memory_mib)
        self._on_error = on_error
        self._files = list_contents(paths, (".parquet",), unpacked_gib=unpacked_gib)
        self._row_groups = RowGroups(self._files, columns, self._count)
        self._starts = np.cumsum([0, *self.block_sizes()])
        """The first row of each row group, and the end."""
        num_bytes = attrgetter("num_bytes")
        self._reader: BlockReader[Chunk] = BlockReader(
            self._row_groups.open, self.block_sizes(), num_bytes, int(memory_mib * 2**20), ROWS_PER_CHUNK
        )
        self._damaged: dict[int, int] = {}
        """How many chunks of each damaged row group can be decoded."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the columns that are read, as they are stored, in all row groups."""
        return int(self._row_groups.num_bytes.sum())

    def column(self, name: str) -> Any:
        """Read a column of all rows, also one that is not in `columns`: a tensor, `Ragged` or a list.

        Some orders need one: `dataset.column("tokens").lengths`, or a column of weights.

        Raises:
            DataError: if there is no such column, it has nulls, or rows cannot be decoded.
        """
        groups = RowGroups(self._files, [name], lambda _: None)
        chunks = [chunk for block in range(len(groups.num_rows)) for chunk in groups.open(block)]
        numbers = np.concatenate([groups.none.numbers, *(chunk.numbers for chunk in chunks)])
        others = [groups.none.others, *(chunk.others for chunk in chunks)]
        return Rows(others, groups.schema, numbers.view(groups.numbers)).columns[name]

    def fingerprint(self) -> str:
        """Return a hash of the columns' names and types, and of the rows and bytes of each row group."""
        columns = [(field.name, str(field.type)) for field in self._row_groups.schema]
        return digest(columns, self._row_groups.num_rows, self._row_groups.num_bytes)

    def block_sizes(self) -> Sequence[int]:
        """Return how many rows each row group has, in all files, one after the other."""
        return list(self._row_groups.num_rows.tolist())

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitems__(self, indices: list[int]) -> Rows:
        """Read rows, in the order in which they are asked for.

        Raises:
            DataError: if a file was changed since the start, or rows cannot be decoded and `on_error` is
                not `skip`.
            IndexError: if there is no such row.
        """
        schema, none = self._row_groups.schema, self._row_groups.none
        if not indices:
            return Rows([], schema)
        asked = np.asarray(indices, np.int64)
        order = np.argsort(asked)
        asked = asked[order]  # so that the rows of a chunk are side by side
        if not 0 <= asked[0] <= asked[-1] < len(self):
            raise IndexError(f"rows {asked[0]} to {asked[-1]} of {len(self)}")
        # Among blocks that begin at the same row this finds the last one, which is the one that has rows.
        blocks = np.searchsorted(self._starts, asked, side="right") - 1
        chunks, rows = np.divmod(asked - self._starts[blocks], ROWS_PER_CHUNK)
        first_rows = asked - rows
        begins = np.concatenate([[0], np.flatnonzero(first_rows[1:] != first_rows[:-1]) + 1])

        numbers = np.empty(len(asked), none.numbers.dtype)
        has_others = none.others.num_columns > 0
        others: list[pa.RecordBatch] = [none.others] * (len(asked) if has_others else 1)
        left_out: list[int] = []
        of_chunks = zip(blocks[begins].tolist(), chunks[begins].tolist(), strict=True)
        bounds = pairwise([*begins.tolist(), len(asked)])
        for (block, number), (begin, end) in zip(of_chunks, bounds, strict=True):
            places, taken = order[begin:end], rows[begin:end]
            chunk = self._chunk(block, number, taken.tolist())
            if chunk is None:
                left_out += places.tolist()
                continue
            numbers[places] = chunk.numbers[taken]
            if has_others:
                # For 64 rows of 128 chunks, three columns, one of lists, a slice of each row and one copy of
                # them all took 100 us; to take the rows of a table of all chunks takes 1,100 us.
                for place, row in zip(places.tolist(), taken.tolist(), strict=True):
                    others[place] = chunk.others.slice(row, 1)
        if left_out:
            numbers = np.delete(numbers, left_out)
        return Rows(others, schema, numbers.view(self._row_groups.numbers))

    def _chunk(self, block: int, number: int, rows: list[int]) -> Chunk | None:
        """Return a chunk, or None if it is left out.

        This does not depend on what was read before: the chunks before the damage can always be read.
        """
        try:
            if number < self._damaged.get(block, number + 1):
                return self._reader.chunk(block, number, rows)
        except DamagedRowsError as error:
            if self._on_error != "skip":
                raise
            first = error.num_chunks * ROWS_PER_CHUNK
            num_rows = self._row_groups.num_rows[block] - first
            logger.warning("%s Its last %d rows are left out.", error.what, num_rows)
            self._damaged[block] = error.num_chunks
        self.num_skipped += len(rows)
        return None
