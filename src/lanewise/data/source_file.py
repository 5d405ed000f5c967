"""The files of a dataset, on this machine or behind an fsspec URL: which there are, and their bytes."""

import glob
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lanewise.errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a glob, or several of them; each local or an fsspec URL."""


class Stamp(NamedTuple):
    """What shows that a file was changed."""

    num_bytes: int
    mtime_ns: int
    """When the file was written last; 0 for a remote file, of which only the size is known."""


def is_remote(path: str) -> bool:
    """Tell whether a path is an fsspec URL."""
    return "://" in path or "::" in path


def list_files(paths: Paths) -> list[str]:
    """Return the files in the order in which they are given, and those of a glob sorted by name.

    Raises:
        DataError: if a glob matches no file, a path is a folder, or fsspec cannot read such URLs.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise DataError("The dataset has no files: paths is empty. Give it a path or a glob.")
    return [file for path in given for file in _matches(os.fspath(path))]


def stamp_of(path: str) -> Stamp:
    """Return a file's stamp.

    Raises:
        DataError: if there is no such file, or it is empty.
    """
    try:
        if is_remote(path):
            files, name = _remote(path)
            stamp = Stamp(int(files.size(name)), 0)
        else:
            status = os.stat(path)  # noqa: PTH116 - a third of the time of Path.stat, and asked for each chunk
            stamp = Stamp(status.st_size, status.st_mtime_ns)
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not stamp.num_bytes:
        raise DataError(f"{path} is empty (0 bytes): it was not written to its end. Write it again.")
    return stamp


def open_file(path: str, count: Callable[[int], None]) -> "SourceFile":
    """Open a file for reading, each time anew: a handle that a fork shares would share its position.

    Args:
        path: as `list_files` returns it.
        count: is told the number of bytes of each read.

    Raises:
        OSError: if it cannot be opened.
    """
    return SourceFile(_open_remote(path) if is_remote(path) else Path(path).open("rb", buffering=0), count)


class SourceFile(io.RawIOBase):
    """A file for reading that counts the bytes which are read of it.

    Args:
        file: what is read.
        count: is told the number of bytes of each read.
    """

    def __init__(self, file: Any, count: Callable[[int], None]) -> None:
        self._file = file
        self._count = count

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return how many there were."""
        num_bytes: int = self._file.readinto(buffer)
        self._count(num_bytes)
        return num_bytes

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position, and return it."""
        moved: int = self._file.seek(position, whence)
        return moved

    def readable(self) -> bool:
        """Tell that the file can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that the file has positions."""
        return True

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()


def _matches(path: str) -> list[str]:
    if is_remote(path):
        files, pattern = _remote(path)
        if not any(sign in pattern for sign in "*["):  # a question mark belongs to the URL
            return [path]
        found = sorted(files.unstrip_protocol(name) for name in files.glob(pattern))
    elif Path(path).is_dir():
        raise DataError(f"{path} is a folder. Name the files in it, as in {Path(path, '*')}.")
    elif not glob.has_magic(path) or Path(path).exists():
        return [path]
    else:
        found = sorted(name for name in glob.glob(path, recursive=True) if not Path(name).is_dir())  # noqa: PTH207
    if not found:
        raise DataError(f"No file matches {path}. The working directory is {Path.cwd()}.")
    return found


def _open_remote(path: str) -> Any:
    files, name = _remote(path)
    return files.open(name, "rb", cache_type="none")  # each reader has a buffer of its own above


def _remote(path: str) -> tuple[Any, str]:
    """Return the file system of a URL, one object a process (a fork gets its own), and the name in it."""
    import fsspec  # noqa: PLC0415 - takes 50 ms, which most runs don't need

    try:
        files, name = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:  # a package for the protocol is missing; no such protocol
        raise DataError(f"{path} cannot be opened: {error}.") from error
    return files, name
