"""The row groups of Parquet files, as the footers describe them, and cursors over each."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from lanewise.data.byte_file import ByteFile
from lanewise.data.digest import digest
from lanewise.errors import DataError

_MISSING: ImportError | None = None
try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as import_error:
    _MISSING = import_error

ROWS_PER_CHUNK = 512
"""How many rows are decoded at a time. With 64 cursors in turn, 512 is twice as fast as 64."""
_BUFFER_BYTES = 2**16
"""What is read at a time of each column of a local file: a cursor holds so much for each."""
_REMOTE_BUFFER_BYTES = 2**20
"""Likewise of a remote one, where each read is a request."""


class DamagedRowsError(DataError):
    """Rows of a row group cannot be decoded.

    Args:
        message: what to tell, with the remedy.
        what: the same without.
        num_chunks: how many chunks before the damage can be decoded. A loader process passes the message on
            alone.
    """

    def __init__(self, message: str, what: str = "", num_chunks: int = 0) -> None:
        super().__init__(message)
        self.what = what
        self.num_chunks = num_chunks


class _File(NamedTuple):
    file: ByteFile
    footer: "pq.FileMetaData"


@final
class RowGroups:
    """The row groups of Parquet files, numbered through: blocks that are read from their start.

    Each footer is read once, here. It stays as pyarrow decoded it, and beside it lie two numbers for each row
    group: 3,000 row groups of 10 columns take 25 MB and 0.1 s.

    Args:
        paths: the files, as `list_files` returns them.
        columns: the columns to read, in this order; None for all, in the order of the first file.

    Raises:
        DataError: if a file cannot be read as Parquet, lacks a column, or has another type for one than the
            first file, or if pyarrow is not installed.
    """

    def __init__(self, paths: Sequence[str], columns: Sequence[str] | None) -> None:
        if _MISSING is not None:
            raise DataError(
                f"Parquet files are read with pyarrow, which cannot be imported: {_MISSING}. "
                "Run: pip install 'lanewise[parquet]'"
            ) from _MISSING
        self.read_bytes = 0
        """Bytes that cursors read."""
        self._files: list[_File] = []
        num_rows: list[int] = []
        num_bytes: list[int] = []
        first_of_file = [0]
        for path in paths:
            file = _read_footer(path)
            schema = _plain_schema(file.footer)
            if not self._files:
                columns = schema.names if columns is None else list(columns)
                self.schema: pa.Schema = _select(schema, columns, path)
                """The columns that are read, with their types."""
            self._refuse_other_types(_select(schema, self.schema.names, path), path)
            self._files.append(file)
            leaves = _leaves(file.footer, self.schema.names)
            for group in map(file.footer.row_group, range(file.footer.num_row_groups)):
                num_rows.append(group.num_rows)
                num_bytes.append(sum(group.column(leaf).total_compressed_size for leaf in leaves))
            first_of_file.append(len(num_rows))
        self.num_rows = np.array(num_rows, np.int64)
        """Of each row group."""
        self.num_bytes = np.array(num_bytes, np.int64)
        """Of each row group: the columns that are read, as they are stored."""
        self._first_of_file = np.array(first_of_file, np.int64)

    def digest(self) -> str:
        """Return a hash of the columns' names and types, and of the rows and bytes of each row group."""
        columns = [(field.name, str(field.type)) for field in self.schema]
        return digest(columns, self.num_rows, self.num_bytes)

    def place(self, block: int) -> str:
        """Say which row group a block is, for an error."""
        file, group = self._find(block)
        return f"row group {group} of {file.file.path} ({self.num_rows[block]:,} rows)"

    def open(self, block: int) -> Generator["pa.RecordBatch", None, None]:
        """Decode a row group from its start, `ROWS_PER_CHUNK` rows at a time.

        Raises:
            DamagedRowsError: if it cannot be decoded.
            DataError: if the file was changed since its footer was read.
        """
        found, group = self._find(block)
        file = found.file
        first, num_rows = 0, int(self.num_rows[block])
        try:
            with file.stream(self._count) as opened:
                batches = self._decode(found, opened, group)
                for first in range(0, num_rows, ROWS_PER_CHUNK):
                    batch = next(batches, None)
                    expected = min(ROWS_PER_CHUNK, num_rows - first)
                    if batch is None or batch.num_rows != expected:
                        raise pa.ArrowInvalid(
                            f"{expected} rows came as {batch.num_rows if batch else 'none'}"
                        )
                    if not file.is_remote:
                        file.check()
                    yield batch
        except (pa.ArrowException, OSError) as error:
            file.check()
            what = (
                f"The {self.place(block)} cannot be decoded after row {first:,}: "
                f"{' '.join(str(error).split())}"
            )
            message = f'{what} Write the file again, or leave such rows out with on_error="skip".'
            raise DamagedRowsError(message, what, first // ROWS_PER_CHUNK) from error

    def _decode(self, found: _File, opened: Any, group: int) -> Generator["pa.RecordBatch", None, None]:
        names = self.schema.names
        stored = pq.ParquetFile(
            opened,
            metadata=found.footer,
            buffer_size=_REMOTE_BUFFER_BYTES if found.file.is_remote else _BUFFER_BYTES,
            pre_buffer=False,  # it would read the whole row group into memory
            page_checksum_verification=True,  # where the file has checksums; costs nothing measurable
        )
        for batch in stored.iter_batches(
            ROWS_PER_CHUNK, row_groups=[group], columns=names, use_threads=False
        ):
            columns = [batch.column(name) for name in names]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)  # which looks dictionaries up

    def _find(self, block: int) -> tuple[_File, int]:
        number = int(np.searchsorted(self._first_of_file, block, side="right")) - 1
        return self._files[number], block - int(self._first_of_file[number])

    def _count(self, num_bytes: int) -> None:
        self.read_bytes += num_bytes

    def _refuse_other_types(self, schema: "pa.Schema", path: str) -> None:
        for ours, other in zip(self.schema, schema, strict=True):
            if ours.type != other.type:
                raise DataError(
                    f"Column {ours.name!r} is {ours.type} in {self._files[0].file.path}, and {other.type} in "
                    f"{path}. Write the files with one type for each column, or name the columns to read."
                )


def _read_footer(path: str) -> _File:
    file = ByteFile.find(path)
    try:
        with file.stream(lambda _: None) as opened:
            return _File(file, pq.ParquetFile(opened, pre_buffer=False).metadata)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} ({file.size:,} bytes) cannot be read as Parquet: {error}") from error


def _plain_schema(footer: "pq.FileMetaData") -> "pa.Schema":
    """Return the columns of a file; one with a dictionary, which each chunk would hold, as what it means."""

    def plain(kind: Any) -> Any:
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    return pa.schema([(field.name, plain(field.type)) for field in footer.schema.to_arrow_schema()])


def _select(schema: "pa.Schema", columns: Sequence[str], path: str) -> "pa.Schema":
    for name in columns:
        if (num_named := len(schema.get_all_field_indices(name))) != 1:
            columns_there = ", ".join(schema.names)
            raise DataError(f"{path} has {num_named or 'no'} columns {name!r}. Its columns: {columns_there}.")
    return pa.schema([schema.field(name) for name in columns])


def _leaves(footer: "pq.FileMetaData", columns: Sequence[str]) -> list[int]:
    """Return the numbers of the stored columns: a struct and the like have several."""
    whole, starts = set(columns), tuple(f"{name}." for name in columns)
    paths = [footer.schema.column(leaf).path for leaf in range(footer.num_columns)]
    return [leaf for leaf, path in enumerate(paths) if path in whole or path.startswith(starts)]
