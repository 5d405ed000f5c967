"""The row groups of Parquet files, as the footers describe them, and cursors over each."""

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from lanewise.data.byte_file import ByteFile
from lanewise.data.rows import is_number
from lanewise.errors import DataError

_MISSING: ImportError | None = None
try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as import_error:
    _MISSING = import_error

ROWS_PER_CHUNK = 512
"""How many rows are decoded at a time. With 64 cursors that alternate, 512 is twice as fast as 64."""
_BUFFER_BYTES = 2**16
"""What is read at a time of each column of a local file: a cursor holds so much for each."""
_REMOTE_BUFFER_BYTES = 2**20
"""What is read at a time of each column of a remote file, where each read is a request."""


class DamagedRowsError(DataError):
    """Rows of a row group cannot be decoded.

    Args:
        message: what is wrong, and the remedy.
        what: the same without the remedy.
        num_chunks: how many chunks before the damage can be decoded. A loader process passes on the message
            only.
    """

    def __init__(self, message: str, what: str = "", num_chunks: int = 0) -> None:
        super().__init__(message)
        self.what = what
        self.num_chunks = num_chunks


class Chunk(NamedTuple):
    """Decoded rows."""

    numbers: npt.NDArray[np.void]
    """[num_rows]: the bytes of a value of the type `RowGroups.numbers` for each row."""
    others: "pa.RecordBatch"
    """The other columns."""

    @property
    def num_bytes(self) -> int:
        """The memory that they take."""
        return int(self.numbers.nbytes + self.others.get_total_buffer_size())


class _File(NamedTuple):
    file: ByteFile
    footer: "pq.FileMetaData"
    schema: "pa.Schema"
    """The columns. The type of a dictionary, which each chunk would hold, is its values'."""


@final
class RowGroups:
    """The row groups of Parquet files, numbered through: blocks that are read from their start.

    Numbers and bools come row by row, if all footers say that they have no nulls: to gather rows of many
    chunks then takes one copy for each chunk, and not one for each row and column. Other columns come as
    pyarrow has them.

    Each footer is read once, here. It stays as pyarrow decoded it, beside a few numbers for each row group:
    3,000 row groups of 10 columns take 25 MB and 0.1 s, and as long again in a child.

    Args:
        stored: the files.
        columns: the columns to read, in this order; None for all, in the order of the first file.
        count: is called with the number of bytes of each read of a row group.

    Raises:
        DataError: if a file cannot be read as Parquet, lacks a column, or has another type for one than the
            first file, or if pyarrow is not installed.
    """

    def __init__(
        self, stored: Sequence[ByteFile], columns: Sequence[str] | None, count: Callable[[int], None]
    ) -> None:
        if _MISSING is not None:
            raise DataError(
                f"Parquet files are read with pyarrow, which cannot be imported: {_MISSING}. "
                "Run: pip install 'lanewise[parquet]'"
            ) from _MISSING
        self._count = count
        files = list(map(_read_footer, stored))
        names = files[0].schema.names if columns is None else columns
        self.schema: pa.Schema = _select(files[0], names)
        """The columns that are read, with their types."""
        self._groups: list[tuple[_File, int]] = []
        """The file of each row group, and its number there."""
        sizes: list[tuple[int, int]] = []
        numbers = {
            field.name: np.dtype(field.type.to_pandas_dtype())
            for field in self.schema
            if is_number(field.type)
        }
        if not _ends_well(files, names):
            damaged = next((file for file in files if not _ends_well([file], names)), files[0]).file
            raise DataError(f"{damaged.path} cannot be read as Parquet: its footer is damaged. Restore it.")
        for file in files:
            for ours, other in zip(self.schema, _select(file, self.schema.names), strict=True):
                if ours.type != other.type:
                    raise DataError(
                        f"Column {ours.name!r} is {ours.type} in {files[0].file.path}, and {other.type} in "
                        f"{file.file.path}. Write the files with one type for each column, or name the "
                        "columns to read."
                    )
            for number, (num_rows, num_bytes, with_nulls) in enumerate(_describe(file, names)):
                self._groups.append((file, number))
                sizes.append((num_rows, num_bytes))
                for name in with_nulls if num_rows else ():
                    numbers.pop(name, None)
        self.num_rows, self.num_bytes = np.array(sizes, np.int64).reshape(-1, 2).T.copy()
        """Rows of each row group, and bytes of the columns that are read, as they are stored."""
        self.numbers = np.dtype(list(numbers.items()))
        """The columns of numbers and bools without nulls."""
        others = pa.schema([field for field in self.schema if field.name not in numbers])
        # NumPy gathers values of a type without fields ten times as fast.
        as_bytes = np.dtype((np.void, self.numbers.itemsize))
        self.none = Chunk(np.empty(0, as_bytes), pa.RecordBatch.from_pylist([], others))
        """A chunk without rows."""

    def open(self, block: int) -> Generator[Chunk, None, None]:
        """Decode a row group from its start, `ROWS_PER_CHUNK` rows at a time.

        Raises:
            DamagedRowsError: if it cannot be decoded.
            DataError: if the file was changed since its footer was read.
        """
        (file, footer, _), group = self._groups[block]
        names, num_rows, first = self.schema.names, int(self.num_rows[block]), 0
        try:
            with file.stream(self._count) as opened:
                stored = pq.ParquetFile(
                    opened,
                    metadata=footer,
                    buffer_size=_REMOTE_BUFFER_BYTES if file.is_remote else _BUFFER_BYTES,
                    pre_buffer=False,  # it would read the whole row group into memory
                    page_checksum_verification=True,  # where the file has checksums; costs nothing measurable
                )
                batches = stored.iter_batches(
                    ROWS_PER_CHUNK, row_groups=[group], columns=names, use_threads=False
                )
                for first in range(0, num_rows, ROWS_PER_CHUNK):
                    batch, expected = next(batches, None), min(ROWS_PER_CHUNK, num_rows - first)
                    if batch is None or batch.num_rows != expected:
                        decoded = batch.num_rows if batch else "none"
                        raise pa.ArrowInvalid(f"{expected} rows came as {decoded}")
                    if not file.is_remote:
                        file.check()
                    yield self._chunk(batch)
        except (pa.ArrowException, OSError) as error:
            file.check()
            place = f"row group {group} of {file.path} ({num_rows:,} rows)"
            what = f"The {place} cannot be decoded after row {first:,}: {' '.join(str(error).split())}"
            message = f'{what} Write the file again, or leave such rows out with on_error="skip".'
            raise DamagedRowsError(message, what, first // ROWS_PER_CHUNK) from error

    def _chunk(self, batch: "pa.RecordBatch") -> Chunk:
        """Copy decoded rows.

        Raises:
            pa.ArrowInvalid: if they have nulls of which the footer did not tell.
        """
        numbers = np.empty(batch.num_rows, self.numbers)
        for name in self.numbers.names or ():
            column = batch.column(name)
            if column.null_count:
                raise pa.ArrowInvalid(f"column {name!r} has nulls, and the footer says that it has none")
            numbers[name] = column.to_numpy(zero_copy_only=False)
        schema = self.none.others.schema
        columns = [batch.column(name) for name in schema.names]
        others = pa.RecordBatch.from_arrays(columns, schema=schema)  # looks dictionaries up
        return Chunk(numbers.view(self.none.numbers.dtype), others)


def _read_footer(file: ByteFile) -> _File:
    try:
        with file.stream(lambda _: None) as opened:
            footer = pq.ParquetFile(opened, pre_buffer=False).metadata
        fields = footer.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{file.path} ({file.size:,} bytes) cannot be read as Parquet: {error}") from error
    kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in fields.types]
    return _File(file, footer, pa.schema(zip(fields.names, kinds, strict=True)))


_SECONDS_TO_LOOK = 120.0


def _ends_well(files: Sequence[_File], names: Sequence[str]) -> bool:
    """Tell whether a child can describe the row groups: a footer that contradicts itself aborts a process."""
    if not (child := os.fork()):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for pyarrow's last words
            faulthandler.disable()
            for file in files:
                _describe(file, names)
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + _SECONDS_TO_LOOK
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.001)
    if not ended[0]:  # a lock that another thread held when it was forked: then nobody has looked
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ended[1] == 0


def _describe(file: _File, names: Sequence[str]) -> list[tuple[int, int, list[str]]]:
    """Return of each row group its rows, the bytes of columns, and which of these may have nulls."""
    leaves, groups = _leaves(file.footer, names), []
    for group in map(file.footer.row_group, range(file.footer.num_row_groups)):
        columns = [group.column(leaf) for leaf in leaves]
        with_nulls = [column.path_in_schema for column in columns if not _has_no_nulls(column)]
        groups.append((group.num_rows, sum(column.total_compressed_size for column in columns), with_nulls))
    return groups


def _has_no_nulls(column: "pq.ColumnChunkMetaData") -> bool:
    """Tell whether the footer says that a stored column has no nulls."""
    statistics = column.statistics
    return statistics is not None and bool(statistics.has_null_count) and statistics.null_count == 0


def _select(of: _File, columns: Sequence[str]) -> "pa.Schema":
    for name in columns:
        if (num_named := len(of.schema.get_all_field_indices(name))) != 1:
            there = ", ".join(of.schema.names)
            raise DataError(f"{of.file.path} has {num_named or 'no'} columns {name!r}. Its columns: {there}.")
    return pa.schema([of.schema.field(name) for name in columns])


def _leaves(footer: "pq.FileMetaData", columns: Sequence[str]) -> list[int]:
    """Return the numbers of the stored columns: a struct and the like have several."""
    whole, starts = set(columns), tuple(f"{name}." for name in columns)
    paths = [footer.schema.column(leaf).path for leaf in range(footer.num_columns)]
    return [leaf for leaf, path in enumerate(paths) if path in whole or path.startswith(starts)]
