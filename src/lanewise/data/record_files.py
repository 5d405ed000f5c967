"""The base class of datasets whose samples are records of files: a subclass decodes their bytes."""

import hashlib
import logging
import sys
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np

from lanewise.data.archive import list_contents
from lanewise.data.block_reader import BlockReader
from lanewise.data.byte_file import ByteFile, Range, open_bytes
from lanewise.data.cache_folder import CacheDir
from lanewise.data.file_content import DamagedContentError, FileContent
from lanewise.data.file_dataset import FileDataset, OnError, check_arguments
from lanewise.data.record_index import RecordIndex, index_files
from lanewise.data.record_scan import ENTRY, Offsets
from lanewise.data.source_file import Paths
from lanewise.errors import DataError

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 8 * 2**20
"""The size of a block of a plain file: long enough to read it in one go, and short enough for many blocks."""
_FAR_AWAY = 2**62
_MAX_ROWS = 512
"""The most rows of a chunk, which is decompressed together."""
_MAX_CHUNKS = 256
"""How many chunks the memory has room for: two for each of 64 strands of a lane, and some more."""
_MAX_WARNINGS = 5
_MAX_SHOWN = 100


class RecordFiles(FileDataset):
    """A dataset of the records of files, in the order of the files. It holds only where the records begin.

    Args:
        paths: a path, a pattern such as `data/*.jsonl`, a URL of fsspec, or several of them; of archives, the
            files in them are meant.
        on_error: whether a record that cannot be decoded, or a file that cannot be decompressed, is an error
            (`raise`) or is left out (`skip`).
        cache_dir: the folder in which to keep where records begin and what was in archives; None stands for
            `$XDG_CACHE_HOME/lanewise`, or `~/.cache/lanewise`.
        memory_mib: how much memory decompressed records that were not asked for yet may take, in MiB, in each
            process that reads.
        unpacked_gib: how much an archive that is unpacked may hold, in GiB; None stands for 100 times its
            own size, and at least 1.

    Raises:
        DataError: if there is no file, or one is empty or cannot be read.
    """

    _separator: bytes | None = b"\n"
    """What stands between two records; with None each file is one record."""
    _endings: tuple[str, ...] = (".txt",)
    """Those of the files that count in an archive."""

    def __init__(
        self,
        paths: Paths,
        *,
        on_error: OnError = "raise",
        cache_dir: CacheDir = None,
        memory_mib: float = 256,
        unpacked_gib: float | None = None,
    ) -> None:
        check_arguments(on_error, memory_mib)
        if self._separator == b"":
            raise DataError("The separator is empty. Give at least one character, or None for whole files.")
        self._on_error = on_error
        files = list_contents(paths, self._endings, cache_dir, unpacked_gib)
        if self._separator is None:
            self._indexes = [_index_of_one(file) for file in files]
        else:
            self._indexes = _whole(index_files(files, self._separator, cache_dir, on_error))
        self.reads_from_start = any(index.file.compression for index in self._indexes)
        sizes = list(map(len, self._indexes))
        self._first = np.cumsum([0, *sizes])
        """[number of files + 1]: the first sample of each file, and the number of all samples."""
        memory = int(memory_mib * 2**20)
        self._rows_per_chunk = self._fitting_rows(memory // _MAX_CHUNKS)
        self._blocks = BlockReader(self._open_block, sizes, _num_bytes, memory, self._rows_per_chunk)

    @abstractmethod
    def _decode(self, record: bytes) -> Any:
        """Make a sample of a record's bytes.

        Raises:
            ValueError: if that is not possible.
        """

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, as they are stored."""
        return sum(index.file.size for index in self._indexes)

    def __len__(self) -> int:
        return int(self._first[-1])

    def fingerprint(self) -> str:
        """Return the number of records and bytes, and a hash of the files' sizes and where records begin."""
        hashed = hashlib.blake2b(repr((type(self).__qualname__, self._separator)).encode(), digest_size=16)
        for index in self._indexes:
            hashed.update(f"{index.file.size} {len(index)} {index.digest};".encode())
        return f"{len(self)} records, {self.total_bytes} bytes, {hashed.hexdigest()}"

    def block_sizes(self) -> Sequence[int]:
        """Return how many consecutive records to read together: about 8 MiB of them, or a compressed file."""
        return [size for index in self._indexes for size in _block_sizes(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Read several records; consecutive ones are one read.

        Raises:
            DataError: if one cannot be decoded, and `on_error` is not `skip`; if a file has changed.
        """
        records = self._read(indices)
        samples = []
        for index in indices:
            record = records[index]
            if isinstance(record, DamagedContentError):
                self._skip(str(record))
                continue
            try:
                samples.append(self._decode(record))
            except ValueError as error:
                message = self._describe(index, record, error)
                if self._on_error == "raise":
                    remedy = "Correct it, or leave such records out with on_error='skip'."
                    raise DataError(f"{message} {remedy}") from error
                self._skip(message)
        return samples

    def _read(self, indices: Sequence[int]) -> dict[int, bytes | DamagedContentError]:
        wanted = np.unique(np.asarray(indices, np.int64))
        numbers = np.searchsorted(self._first, wanted, side="right") - 1
        records: list[bytes | DamagedContentError] = []
        for number in np.unique(numbers).tolist():
            read = self._decompress if self._indexes[number].file.compression else self._read_ranges
            try:
                records += read(number, wanted[numbers == number] - self._first[number])
            except DamagedContentError as error:  # of a file that is one record, and so was not searched
                if self._on_error == "raise":
                    raise
                records.append(error)
        return dict(zip(wanted.tolist(), records, strict=True))

    def _read_ranges(self, number: int, rows: Offsets) -> list[bytes]:
        """Return some records of a plain file, whose rows ascend; adjacent records are one read."""
        index = self._indexes[number]
        bounds = index.bounds(rows)
        ranges: list[Range] = []
        for begin, end in bounds:
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        data = b"".join(open_bytes(index.file).read(ranges))
        self._count(len(data))
        return self._cut(data, index, rows, bounds)

    def _decompress(self, number: int, rows: Offsets) -> list[bytes]:
        """Return some records of a compressed file, whose rows ascend."""
        records: list[bytes] = []
        for of_chunk, wanted in groupby(rows.tolist(), lambda row: row // self._rows_per_chunk):
            places = [row - of_chunk * self._rows_per_chunk for row in wanted]
            chunk = self._blocks.chunk(number, of_chunk, places)
            records += [chunk[place] for place in places]
        return records

    def _open_block(self, number: int) -> Generator[list[bytes], None, None]:
        """Yield the records of a compressed file, in lists of `rows_per_chunk`."""
        index = self._indexes[number]
        with FileContent(index.file, self._count) as content:
            if self._separator is None:
                yield [content.read(_FAR_AWAY)]
                return
            at = 0
            for first in range(0, len(index), self._rows_per_chunk):
                rows = np.arange(first, min(first + self._rows_per_chunk, len(index)))
                bounds = index.bounds(rows)
                base, end = bounds[0][0], bounds[-1][1]
                try:
                    data = content.read(end - at)[base - at :]
                except DamagedContentError as error:
                    what = f"from here on it cannot be decompressed ({error.__cause__!r})"
                    raise index.contradiction(at, what) from error
                at = end
                yield self._cut(data, index, rows, bounds)

    def _cut(self, data: bytes, index: RecordIndex, rows: Offsets, bounds: list[Range]) -> list[bytes]:
        """Cut data, in which some records follow each other, into these, without their separators.

        Raises:
            DataError: if a record is not the one of which the index was made.
        """
        places = accumulate((end - begin for begin, end in bounds), initial=0)
        records = [data[begin:end] for begin, end in pairwise(places)]
        if self._separator is not None:
            records = [record.partition(self._separator)[0] for record in records]  # empty ones may follow it
            if self._separator == b"\n":
                records = [record.removesuffix(b"\r") for record in records]
            index.check(rows, records)
        return records

    def _describe(self, index: int, record: bytes, error: Exception) -> str:
        """Say which record cannot be decoded, and why."""
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        file, offsets = self._indexes[number].file, self._indexes[number].offsets
        offset = int(offsets[index - self._first[number]])
        if isinstance(error, UnicodeDecodeError):
            offset += error.start
        shown = f"{record[:_MAX_SHOWN]!r}{' ...' if len(record) > _MAX_SHOWN else ''}"
        place = f"{file.path}, byte {offset:,}{' of its content' if file.compression else ''}"
        return f"{place}: {error}. The record begins: {shown}."

    def _skip(self, message: str) -> None:
        self.num_skipped += 1
        if self.num_skipped <= _MAX_WARNINGS:
            last = " No more are named." if self.num_skipped == _MAX_WARNINGS else ""
            logger.warning("left out: %s%s", message, last)

    def _fitting_rows(self, num_bytes: int) -> int:
        """Return how many records of compressed files have about so many bytes."""
        indexes = [index for index in self._indexes if index.file.compression]
        total = sum(int(index.offsets[-1]) for index in indexes)
        return max(1, min(_MAX_ROWS, num_bytes * sum(map(len, indexes)) // max(1, total)))


def _block_sizes(index: RecordIndex) -> Iterator[int]:
    last, cuts = len(index), [0]
    if not index.file.compression:
        # np.searchsorted would copy the offsets, as they don't lie side by side.
        begins = range(0, index.file.size, _BLOCK_BYTES)
        cuts += [bisect_left(index.offsets, begin, hi=last) for begin in begins]
    yield from np.diff(np.unique([*cuts, last])).tolist()


def _index_of_one(file: ByteFile) -> RecordIndex:
    """Return the index of a file that is one record. The end of a compressed one is not known."""
    end = _FAR_AWAY if file.compression else file.size
    return RecordIndex(file, np.array([(0, 0), (end, 0)], ENTRY), end)


def _whole(indexes: list[RecordIndex]) -> list[RecordIndex]:
    """Return the indexes of files that can be decompressed, and say how much is left out."""
    damaged = [index.file for index in indexes if index.is_damaged]
    if damaged:
        left_out = (
            f"{len(damaged)} of {len(indexes)} files, {sum(file.size for file in damaged):,} of "
            f"{sum(index.file.size for index in indexes):,} bytes, which cannot be decompressed to the end: "
            f"{', '.join(file.path for file in damaged[:_MAX_WARNINGS])}"
        )
        if len(damaged) == len(indexes):
            raise DataError(f"No sample is left: {left_out}. Write them again.")
        logger.warning("left out: %s", left_out)
    return [index for index in indexes if not index.is_damaged]


def _num_bytes(records: list[bytes]) -> int:
    return sum(map(sys.getsizeof, records))
