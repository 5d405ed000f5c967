"""One stored file, on a disk or behind a URL, read by ranges of bytes or from its beginning to its end."""

import hashlib
import io
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self, TypeAlias, final

from fsspec.utils import infer_compression

from lanewise.data.source_file import file_name, file_system, is_remote
from lanewise.data.tar import tar_ranges
from lanewise.errors import DataError

_VERSION_KEYS = ("ETag", "etag", "generation", "LastModified", "last_modified", "updated", "mtime", "created")
"""The names under which file systems of fsspec tell which version of a file they have."""
_ARCHIVE = re.compile(r"\.(zip|tar|tar\.(gz|bz2|xz|zst|lz4|lzma)|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
_SHORT = {"tgz": "gz", "tbz": "bz2", "tbz2": "bz2", "txz": "xz"}
MAX_OPEN = 128
"""Most machines allow a process 1,024 open files; on some networks it takes milliseconds to open one."""

Range: TypeAlias = tuple[int, int]
"""First byte, and the byte after the last one."""


class ByteFile(NamedTuple):
    """A file as it was found. It must not change while it is in use."""

    path: str
    """An absolute path, or a URL; for a member of an archive `tar://MEMBER::PATH`, which is only shown."""
    size: int
    """The number of its bytes, as it is stored."""
    stamp: int
    """Differs between versions of the file: nanoseconds of its last change, or a hash of what a URL tells."""
    archive: "ByteFile | None" = None
    """The tar archive of which the file is a member."""
    begin: int = 0
    """The byte of the archive at which the file begins."""
    name: str = ""
    """What tells by its ending what the file is."""

    @classmethod
    def find(cls, path: str) -> "ByteFile":
        """Look at a file whose content is to be read.

        Raises:
            DataError: if it does not exist, is empty, or is compressed in a way that cannot be read here.
        """
        return cls.stored(path).require_content()

    @classmethod
    def stored(cls, path: str) -> "ByteFile":
        """Look at a file, whatever it is.

        Raises:
            DataError: if it does not exist.
        """
        if not is_remote(path):
            path = str(Path(path).absolute())  # also after another working directory is set
        return cls(path, *_stat(path), name=file_name(path))

    def require_content(self) -> Self:
        """Return the file, which has content that can be read.

        Raises:
            DataError: if it is empty, or is compressed in a way that cannot be read here.
        """
        if not self.size:
            raise DataError(f"{self.path} is empty (0 bytes). Leave it out, or write it again.")
        if self.name.endswith(".zst") and not self.compression:
            raise DataError(f"{self.path} needs the package zstandard to be read: pip install zstandard.")
        if _ARCHIVE.search(self.name):
            raise DataError(f"{self.path} is an archive, which may hold several files. Unpack it.")
        return self

    @property
    def is_remote(self) -> bool:
        """Whether it is read through fsspec."""
        return is_remote((self.archive or self).path)

    @property
    def compression(self) -> str | None:
        """How the content is compressed, in fsspec's words, judged by the file's name; None if it is not."""
        stem, _, ending = self.name.rpartition(".")
        known: str | None = infer_compression(f"{stem}.{_SHORT.get(ending.lower(), ending)}")
        return known

    def open(self) -> "OpenBytes":
        """Open the file to read ranges of it.

        Raises:
            DataError: if it cannot be opened, or has changed.
        """
        return RemoteBytes(self) if self.is_remote else LocalBytes(self)

    def stream(self, count: Callable[[int], None]) -> "ByteStream":
        """Open the file to read on from a position in it: a new handle, as forks share a handle's position.

        Args:
            count: is called with the number of bytes of each read.

        Raises:
            DataError: if the file cannot be opened, or has changed.
        """
        self.check()
        stored = self.archive or self
        with _reading(self.path):
            if not self.is_remote:
                return ByteStream(self, Path(stored.path).open("rb", buffering=0), count)
            files, name = file_system(stored.path)
            opened = files.open(name, "rb", cache_type="none")  # its reader has a buffer
            return ByteStream(self, opened, count)

    def check(self, descriptor: int | None = None) -> None:
        """Make sure that the file has not changed. For a local file this takes a microsecond.

        Args:
            descriptor: the file's where it is open; None looks at the file that is at its path now.

        Raises:
            DataError: if it has changed.
        """
        if self.archive is not None:
            self.archive.check(descriptor)
            return
        size, stamp = _stat(self.path, descriptor)
        if (size, stamp) != (self.size, self.stamp):
            raise DataError(
                f"{self.path} has changed while it was in use: it had {self.size:,} bytes, and has {size:,} "
                f"now, written at {stamp} and not at {self.stamp}. Write new data to new files, and start "
                "again."
            )


@final
class ByteStream(io.RawIOBase):
    """A file that is read from a position on, and counts the bytes that are read of it.

    Args:
        file: what is read.
        opened: the same file, open.
        count: is called with the number of bytes of each read.
    """

    def __init__(self, file: ByteFile, opened: io.RawIOBase, count: Callable[[int], None]) -> None:
        self._file = file
        self._opened = opened
        self._count = count
        self.seek(0)

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return how many there were.

        Raises:
            DataError: if they cannot be read, which is different from bytes that cannot be decoded.
        """
        with _reading(self._file.path):
            left = max(0, self._file.size - self.tell())
            num_bytes = self._opened.readinto(memoryview(buffer)[:left])
        self._count(num_bytes)
        return num_bytes

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position, and return it."""
        begin = self._file.begin
        if whence == os.SEEK_END:
            return self._opened.seek(begin + self._file.size + position) - begin
        return self._opened.seek(position + (begin if whence == os.SEEK_SET else 0), whence) - begin

    def readable(self) -> bool:
        """Tell that the file can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that the file has positions."""
        return True

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._opened.close()
        super().close()


@final
class LocalBytes:
    """An open file on a disk, of which several threads may read ranges.

    It is closed when nothing refers to it.
    """

    def __init__(self, file: ByteFile) -> None:
        self._file = file
        with _reading(file.path):
            self.descriptor = os.open((file.archive or file).path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.check()

    def check(self) -> None:
        """Make sure that the file has not changed.

        Raises:
            DataError: if it has changed.
        """
        self._file.check(self.descriptor)

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range, whole.

        Raises:
            DataError: if the file cannot be read, or has changed.
        """
        self.check()
        base = self._file.begin
        with _reading(self._file.path):
            return [self._read(base + begin, base + end) for begin, end in ranges]

    def _read(self, begin: int, end: int) -> bytes:
        data = os.pread(self.descriptor, end - begin, begin)
        while begin + len(data) < end:  # above 2 GiB, or at the end of the file
            part = os.pread(self.descriptor, end - begin - len(data), begin + len(data))
            if not part:
                self.check()
                raise DataError(f"{self._file.path} ends before byte {end:,}.")
            data += part
        return data


@final
class RemoteBytes:
    """A file behind a URL, of which several threads may read ranges."""

    def __init__(self, file: ByteFile) -> None:
        file.check()
        stored = (file.archive or file).path
        self._path = file.path
        self._begin = file.begin
        self._file_system, self._name = file_system(stored)
        # All files of an archive are read through one handle, and so through one position in it.
        self._turn: AbstractContextManager[Any] = Lock() if "::" in stored else nullcontext()

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range, whole.

        Raises:
            DataError: if the file cannot be read, or has become shorter.
        """
        base = self._begin
        begins, ends = [base + begin for begin, _ in ranges], [base + end for _, end in ranges]
        with _reading(self._path), self._turn:
            parts: list[bytes] = self._file_system.cat_ranges(
                [self._name] * len(ranges), begins, ends, on_error="raise"
            )
        for (begin, end), part in zip(ranges, parts, strict=True):
            if len(part) != end - begin:
                raise DataError(
                    f"{self._path} gave {len(part):,} bytes where bytes {begin:,} to {end:,} were asked for: "
                    "it has changed, or its server cannot send ranges. Copy it to a disk."
                )
        return parts


OpenBytes: TypeAlias = LocalBytes | RemoteBytes


def open_bytes(file: ByteFile) -> OpenBytes:
    """Return an open file. Each process opens its own, and keeps the ones that it used last.

    Raises:
        DataError: if it cannot be opened, or has changed.
    """
    return _open_bytes(file, os.getpid())


@lru_cache(maxsize=MAX_OPEN)
def _open_bytes(file: ByteFile, process: int) -> OpenBytes:  # noqa: ARG001 - of the cache's key
    return file.open()


@lru_cache(maxsize=MAX_OPEN)
def tar_members(archive: ByteFile) -> Mapping[str, ByteFile]:
    """Return the files in a tar archive by their names there; of several of a name the last one counts.

    Raises:
        DataError: if the archive cannot be read, is compressed, cut or damaged, or holds a file with holes.
    """
    with _reading(archive.path), io.BufferedReader(archive.stream(lambda _: None)) as stored:
        ranges = tar_ranges(stored)
    return {
        name: ByteFile(f"tar://{name}::{archive.path}", end - begin, archive.stamp, archive, begin, name)
        for name, (begin, end) in ranges.items()
    }


def unreadable(path: str, error: Exception) -> DataError:
    """Make the error of a file that the file system, or the decompression, refuses."""
    reason = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
    return DataError(f"{path} cannot be read: {reason}.")


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn the errors of any file system into one.

    Raises:
        DataError: names the file and the reason.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise unreadable(path, error) from error


def _stat(path: str, descriptor: int | None = None) -> tuple[int, int]:
    """Return the size and the stamp of a file."""
    if is_remote(path):
        return _stat_url(path)
    try:
        status = os.stat(path if descriptor is None else descriptor)  # noqa: PTH116 - takes a third of Path.stat
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise unreadable(path, error) from error
    return status.st_size, status.st_mtime_ns


def _stat_url(url: str) -> tuple[int, int]:
    files, name = file_system(url)
    with _reading(url):
        info: dict[str, Any] = files.info(name)
    if info.get("size") is None:
        raise DataError(f"{url} does not tell its size, so no part of it can be read. Copy it to a disk.")
    version = [str(info[key]) for key in _VERSION_KEYS if key in info]
    stamp = hashlib.blake2b(repr(version).encode(), digest_size=7).digest()
    return int(info["size"]), int.from_bytes(stamp)
