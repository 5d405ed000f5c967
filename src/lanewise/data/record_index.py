"""Where the records of text files begin, and their checksums: found once, and kept in a folder."""

import hashlib
import io
import logging
import os
import struct
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import numpy as np

from lanewise.data.byte_file import ByteFile
from lanewise.data.cache_folder import CacheDir, alone, cache_folder
from lanewise.data.file_content import DamagedContentError
from lanewise.data.file_dataset import OnError
from lanewise.data.record_scan import ENTRY, Entries, Offsets, scan_file
from lanewise.errors import DataError, StorageError
from lanewise.runs.file import open_regular, replacing

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sqqqq16sII")
"""Magic, size and stamp of the file, number of records, bytes of the longest one, digest of the offsets, and
CRC-32 of the entries, which follow, and of the header up to here."""
_MAGIC = b"LWrecrd3"
_MAX_LOADED_BYTES = 64 * 2**20
"""A larger index stays on the disk and is mapped into memory: processes of one machine share its pages."""
_MAX_THREADS = 16
_SMALL_BYTES = 2**20
"""Members of an archive up to this size share a file in the cache folder, which takes longer to write than to
search them."""
_LONG_BYTES = 2**30
"""A file of this size takes so long to search that a line is logged before."""
_DAMAGED = np.array([(-1, 0)], ENTRY)
"""The entries of a content that cannot be decompressed to its end."""


@dataclass
class RecordIndex:
    """Where the records of one file begin, and the checksum of each, as `find_records` yields them.

    After an index was made, it may be damaged on the disk, and so may the file without a change of its size
    and time. Each record is compared with its checksum when it is read, which finds both.
    """

    file: ByteFile
    entries: Entries
    """[number of records + 1]."""
    longest: int
    """Bytes of the longest record, with its separator: a damaged offset never asks for more."""
    digest: str = ""
    """32 hexadecimal digits, equal for equal offsets."""
    kept: Path | None = None
    """The file in which the index is kept; None if it is in memory only."""
    is_new: bool = False
    """Whether it was made now."""
    unkept: Exception | None = None
    """Why it could not be kept in the cache folder."""

    def __len__(self) -> int:
        return len(self.entries) - 1

    @property
    def offsets(self) -> Offsets:
        """[number of records + 1], in bytes of the file's decompressed content."""
        return self.entries["offset"]

    @property
    def is_damaged(self) -> bool:
        """Whether the file could not be decompressed to its end. Such a file has no records."""
        return bool(self.offsets[-1] < 0)

    def bounds(self, rows: Offsets) -> list[tuple[int, int]]:
        """Return where each of some records begins and ends.

        Raises:
            DataError: if an offset is impossible.
        """
        bounds = list(zip(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist(), strict=True))
        for begin, end in bounds:
            if not 0 <= begin < end <= begin + self.longest:
                raise self.contradiction(begin, f"the record cannot end at byte {end:,}")
        return bounds

    def check(self, rows: Offsets, records: Sequence[bytes]) -> None:
        """Make sure that records, without their separators, are those of which the index was made.

        Raises:
            DataError: if one is another.
        """
        wrong = np.flatnonzero(self.entries["checksum"][rows] != list(map(crc32, records)))
        if wrong.size:
            offset = int(self.offsets[rows[wrong[0]]])
            raise self.contradiction(offset, "the record has another checksum than it had")

    def contradiction(self, offset: int, what: str) -> DataError:
        """Make the error of a file that contradicts its index."""
        place = f"{self.file.path}, byte {offset:,}{' of its content' if self.file.compression else ''}"
        index = f"the index {self.kept}" if self.kept else "the memory"
        remedy = " If the file is as it should be, delete the index, which is made anew." if self.kept else ""
        return DataError(
            f"{place}: {what}, though the file's size and time are those with which it was searched. Either "
            f"the file is damaged or {index}. Restore the file.{remedy}"
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"entries": None} if isinstance(self.entries, np.memmap) else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["entries"] is None and self.kept:
            indexes = _load(self.kept, [self.file], "skip")
            if indexes is None or indexes[0].digest != self.digest:
                raise DataError(
                    f"The index {self.kept} cannot be read any more, or was made anew, as its file changed. "
                    "Start again."
                )
            self.entries = indexes[0].entries


def index_files(
    files: Sequence[ByteFile], separator: bytes, cache_dir: CacheDir, on_error: OnError = "raise"
) -> list[RecordIndex]:
    """Return the index of each file, from the cache folder if it is there.

    If several processes need the same index at once, one of them builds it. It is built again if the file has
    changed, or if the kept index is damaged.

    Args:
        files: compressed or not.
        separator: what stands between records, at least one byte.
        cache_dir: the folder in which to keep indexes. If it cannot be written, indexes stay in memory, and a
            log line says so.
        on_error: whether a file that cannot be decompressed to its end is an error, or has no records.

    Raises:
        DataError: if a file cannot be read, changes, or holds no record.
    """
    started = time.monotonic()
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        groups = [list(group) for _, group in groupby(files, _shares_with)]
        found = pool.map(lambda group: _index_group(group, separator, cache_dir, on_error), groups)
        indexes = list(chain.from_iterable(found))
    for index in indexes:
        if not len(index) and not index.is_damaged:
            raise DataError(f"{index.file.path} holds no record that is not empty. Leave it out.")
    if built := [index for index in indexes if index.is_new]:
        of, mib = f"{len(built)} of {len(files)} files", sum(index.file.size for index in built) / 2**20
        text, seconds = "found %s records in %s, of %.1f MiB, in %.1f s", time.monotonic() - started
        logger.info(text, f"{sum(map(len, built)):,}", of, mib, seconds)
    if unkept := [index.unkept for index in indexes if index.unkept]:
        logger.warning("each process finds again where records begin, as it cannot be kept: %s", unkept[0])
    return indexes


def _shares_with(file: ByteFile) -> ByteFile:
    return file.archive if file.archive and file.size <= _SMALL_BYTES else file


def _index_group(
    files: list[ByteFile], separator: bytes, cache_dir: CacheDir, on_error: OnError
) -> list[RecordIndex]:
    """Return the indexes of files that share a file in the cache folder."""
    try:
        folder = cache_folder(cache_dir)
        key = os.fsencode("\0".join(file.path for file in files)) + b"\0" + separator
        path = folder / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.records"
        if (indexes := _load(path, files, on_error)) is not None:
            return indexes
        folder.mkdir(parents=True, exist_ok=True)
        with alone(path.with_suffix(".lock"), f"find the records of {_shares_with(files[0]).path}"):
            if (indexes := _load(path, files, on_error)) is not None:
                return indexes
            with replacing(path) as new, new.open("xb") as out:
                _write(out, files, separator, on_error)
                out.flush()
                os.fsync(out.fileno())
            if (indexes := _load(path, files, on_error)) is not None:
                return [replace(index, is_new=True) for index in indexes]
            raise OSError(f"{path} is not as it was written")
    except (OSError, StorageError, RuntimeError, ValueError) as error:  # no home folder; a null in a name
        in_memory = io.BytesIO()
        _write(in_memory, files, separator, on_error)
        in_memory.seek(0)
        indexes = _read(in_memory, files, None)
        assert indexes is not None, "they were written now"
        return [replace(index, is_new=True, unkept=error) for index in indexes]


def _write(out: IO[bytes], files: list[ByteFile], separator: bytes, on_error: OnError) -> None:
    """Search files, and write their indexes one after another."""
    for file in files:
        if file.size >= _LONG_BYTES:
            logger.info("finding the records of %s, %.1f GiB", file.path, file.size / 2**30)
        begin = out.tell()
        try:
            _write_parts(out, file, scan_file(file, separator))
        except DamagedContentError:
            if on_error == "raise":
                raise
            # No part of it counts: gzip's checksum stands at the end, so any part before may be wrong too.
            out.truncate(out.seek(begin))
            _write_parts(out, file, [_DAMAGED])


def _write_parts(out: IO[bytes], file: ByteFile, parts: Iterable[Entries]) -> None:
    num_entries = longest = checksum = 0
    at = out.tell()
    end: int | None = None
    hashed = hashlib.blake2b(digest_size=16)
    out.seek(at + _HEADER.size)
    for part in filter(len, parts):
        offsets, written = part["offset"], part.tobytes()
        first = 0 if end is None else offsets[0] - end
        longest = max(longest, int(np.ediff1d(offsets, to_begin=first).max()))
        end = int(offsets[-1])
        num_entries += len(part)
        hashed.update(offsets.tobytes())
        checksum = crc32(written, checksum)
        out.write(written)
    known = (_MAGIC, file.size, file.stamp, num_entries - 1, longest, hashed.digest(), checksum)
    header = _HEADER.pack(*known, 0)[:-4]
    out.seek(at)
    out.write(header + struct.pack("<I", crc32(header)))
    out.seek(0, os.SEEK_END)


def _load(path: Path, files: list[ByteFile], on_error: OnError) -> list[RecordIndex] | None:
    """Return the kept indexes; None if there are none, or one is damaged or of another version of a file."""
    try:
        with open_regular(path) as kept:
            indexes = _read(kept, files, path)
    except (OSError, ValueError):
        return None
    # If a damaged file is an error, it is searched again, so that the error says what is wrong.
    is_error = indexes and on_error == "raise" and any(index.is_damaged for index in indexes)
    return None if is_error else indexes


def _read(kept: IO[bytes], files: list[ByteFile], path: Path | None) -> list[RecordIndex] | None:
    """Return the indexes of files; None if one is damaged or of another version of a file, or too many."""
    num_left = kept.seek(0, os.SEEK_END)
    kept.seek(0)
    indexes = []
    for file in files:
        if (num_left := num_left - _HEADER.size) < 0:
            return None
        header = kept.read(_HEADER.size)
        magic, size, stamp, num_records, longest, digest, checksum, of_header = _HEADER.unpack(header)
        num_left -= (num_bytes := ENTRY.itemsize * (num_records + 1))
        known = _MAGIC, file.size, file.stamp, of_header
        if (magic, size, stamp, crc32(header[:-4])) != known or num_left < 0:
            return None
        if path is not None and num_bytes > _MAX_LOADED_BYTES and len(files) == 1:  # then it begins the file
            entries: Entries = np.memmap(path, ENTRY, "r", _HEADER.size, (num_records + 1,))
        else:
            data = kept.read(num_bytes)
            entries = np.frombuffer(data, ENTRY)
            if crc32(data) != checksum:
                return None
        index = RecordIndex(file, entries, longest, digest.hex(), path)
        if not file.compression and entries["offset"][-1] != file.size:
            return None
        indexes.append(index)
    return None if num_left else indexes
