"""Where the records of text files begin: found once, and kept in a folder for the next time."""

import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from lanewise.data.byte_file import ByteFile
from lanewise.data.record_scan import Offsets, scan_file
from lanewise.errors import DataError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sqqqq16s8x")
"""Magic, size and stamp of the file, number of records, end of the text, digest of the offsets."""
_MAGIC = b"LWrecrd1"
_MAX_LOADED_BYTES = 64 * 2**20
"""An index of more stays on the disk, and is mapped: the processes of a machine share its pages."""
_MAX_THREADS = 16
_LONG_BYTES = 2**30
"""What takes so long to search that a line is logged before."""


@dataclass
class RecordIndex:
    """Where the records of one file begin, as `record_offsets` tells it."""

    offsets: Offsets
    """[number of records + 1], in bytes of what the file holds, decompressed."""
    digest: str
    """32 hexadecimal digits, equal for equal offsets."""
    mapped: Path | None = None
    """The file in which the offsets lie, where they are not in memory."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"offsets": len(self.offsets)} if self.mapped else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.mapped:
            try:
                with self.mapped.open("rb") as kept:
                    digest = _HEADER.unpack(kept.read(_HEADER.size))[-1].hex()
                self.offsets = _map(self.mapped, state["offsets"])
            except (OSError, ValueError, struct.error) as error:
                raise DataError(f"The index {self.mapped} cannot be read any more: {error}.") from error
            if digest != self.digest:
                raise DataError(f"The index {self.mapped} was made anew, as its file changed. Start again.")


def index_files(
    files: Sequence[ByteFile], separator: bytes, cache_dir: str | os.PathLike[str] | None
) -> list[RecordIndex]:
    """Return the index of each file, from the cache folder if it is there.

    Processes that ask for the same one at once build it once. It is built anew where the file has changed, or
    the one that is kept is damaged.

    Args:
        files: compressed or not.
        separator: what stands between records, at least one byte.
        cache_dir: a folder to keep indexes in; None: `$XDG_CACHE_HOME/lanewise`, or `~/.cache/lanewise`.
            Where it cannot be written, indexes stay in memory, and a log line says so.

    Raises:
        DataError: if a file cannot be read, changes, or holds no record.
    """
    started = time.monotonic()
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    # Several files at a time, and several ranges of each: a task of the first kind waits for the second.
    with ThreadPoolExecutor(num_threads) as searching, ThreadPoolExecutor(num_threads) as indexing:
        indexed = list(indexing.map(lambda file: _index_file(file, separator, cache_dir, searching), files))
    for file, one in zip(files, indexed, strict=True):
        if not len(one.records):
            raise DataError(f"{file.path} holds no record that is not empty. Leave it out.")
    if built := [file for file, one in zip(files, indexed, strict=True) if one.is_new]:
        logger.info(
            "found %s records in %d of %d files, of %.1f MiB, in %.1f s",
            f"{sum(len(one.records) for one in indexed if one.is_new):,}",
            len(built),
            len(files),
            sum(file.size for file in built) / 2**20,
            time.monotonic() - started,
        )
    if unkept := [one.unkept for one in indexed if one.unkept]:
        logger.warning("each process finds again where records begin, as it cannot be kept: %s", unkept[0])
    return [one.records for one in indexed]


class _Indexed(NamedTuple):
    records: RecordIndex
    is_new: bool = False
    unkept: Exception | None = None
    """Why it is in no cache."""


def _index_file(
    file: ByteFile, separator: bytes, cache_dir: str | os.PathLike[str] | None, pool: Executor
) -> _Indexed:
    try:
        folder = Path(cache_dir).expanduser() if cache_dir else _cache_folder()
        path = folder.absolute() / _name(file, separator)
        if index := _load(path, file):
            return _Indexed(index)
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock"), file):
            if index := _load(path, file):
                return _Indexed(index)
            _build(path, file, separator, pool)
            if index := _load(path, file):
                return _Indexed(index, is_new=True)
            raise OSError(f"{path} is not as it was written")
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows the home folder
        offsets = np.concatenate(list(_scan(file, separator, pool)))
        return _Indexed(RecordIndex(offsets, _digest(offsets)), is_new=True, unkept=error)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lanewise"


def _name(file: ByteFile, separator: bytes) -> str:
    key = os.fsencode(file.path) + b"\0" + separator
    return hashlib.blake2b(key, digest_size=16).hexdigest() + ".records"


@contextmanager
def _alone(lock: Path, file: ByteFile) -> Iterator[None]:
    """Wait until no other process of this machine builds the index."""
    with lock.open("ab") as locked:
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process to find the records of %s", file.path)
            fcntl.flock(locked, fcntl.LOCK_EX)
        except OSError as error:  # of a network's file system: each process builds the index then
            logger.debug("%s cannot be locked: %s", lock, error)
        yield
        # Whoever waits has it open; whoever comes later makes a new one, and finds the index.
        lock.unlink(missing_ok=True)


def _build(path: Path, file: ByteFile, separator: bytes, pool: Executor) -> None:
    for leftover in path.parent.glob(f"{path.stem}.*.tmp"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    new = path.with_suffix(f".{uuid4().hex}.tmp")
    num_records, end, hashed = -1, 0, hashlib.blake2b(digest_size=16)
    try:
        with new.open("xb") as out:
            out.seek(_HEADER.size)
            for part in _scan(file, separator, pool):
                written = part.astype("<i8", copy=False).tobytes()
                out.write(written)
                hashed.update(written)
                num_records += len(part)
                end = int(part[-1]) if len(part) else end
            out.seek(0)
            out.write(_HEADER.pack(_MAGIC, file.size, file.stamp, num_records, end, hashed.digest()))
            out.flush()
            os.fsync(out.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _scan(file: ByteFile, separator: bytes, pool: Executor) -> Iterator[Offsets]:
    if file.size >= _LONG_BYTES:
        logger.info("finding the records of %s, %.1f GiB", file.path, file.size / 2**30)
    return scan_file(file, separator, pool)


def _load(path: Path, file: ByteFile) -> RecordIndex | None:
    """Return the index that is kept, or None: it is not there, of another version of the file, or damaged."""
    try:
        with path.open("rb") as kept:
            header = kept.read(_HEADER.size)
            num_bytes = os.fstat(kept.fileno()).st_size - _HEADER.size
            if len(header) < _HEADER.size:
                return None
            magic, size, stamp, num_records, end, digest = _HEADER.unpack(header)
            if (magic, size, stamp) != (_MAGIC, file.size, file.stamp) or num_bytes != 8 * (num_records + 1):
                return None
            if num_bytes <= _MAX_LOADED_BYTES:
                offsets = np.fromfile(kept, "<i8")
                is_whole = _digest(offsets) == digest.hex()
                return RecordIndex(offsets, digest.hex()) if is_whole else None
        offsets = _map(path, num_records + 1)
        return RecordIndex(offsets, digest.hex(), path) if offsets[-1] == end else None
    except OSError:
        return None


def _map(path: Path, length: int) -> Offsets:
    return np.memmap(path, "<i8", "r", _HEADER.size, (length,))


def _digest(offsets: Offsets) -> str:
    return hashlib.blake2b(offsets.astype("<i8", copy=False).tobytes(), digest_size=16).hexdigest()
