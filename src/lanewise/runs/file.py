"""Opens and replaces files of a run: never through a link, and with one error for what the disk refuses."""

import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO, final

from lanewise.errors import CheckpointError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOVED = (
    "it was moved or removed during the run. Move it back, or set train.run_dir to its new place, and resume"
)
_scan = json.JSONDecoder().raw_decode


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it, without waiting.

    Raises:
        OSError: if it is a link, a pipe, a device or a folder, or cannot be read.
    """
    return open(path, "rb", opener=_open)


def open_log(path: Path) -> TextIO:
    """Open a file to append lines, each of which stays if the process is killed.

    Raises:
        OSError: if it is a link, a pipe, a device or a folder, or cannot be written.
    """
    return open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1, opener=_open)


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a line holds, which may be anybody's; None where it holds none.

    None also for an integer of thousands of digits, which Python does not read, and for a nesting that is
    too deep for it.
    """
    try:
        text = line.decode().strip()
        columns, end = _scan(text)  # in half the time that json.loads takes
    except (ValueError, RecursionError):
        return None
    return columns if isinstance(columns, dict) and end == len(text) else None


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file that may hold anything.

    Raises:
        OSError: if it is not a regular file, or cannot be read.
        ValueError: if it is longer than `max_bytes`, or is not strict JSON.
        RecursionError: if it is nested too deeply.
    """
    with open_regular(path) as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def dump_json(tree: Any, indent: int | None = None) -> str:
    """Write a tree as JSON; a number that JSON lacks, NaN or an infinite one, becomes null."""
    encoder = _encoder if indent is None else json.JSONEncoder(allow_nan=False, indent=indent)
    try:
        return encoder.encode(tree)
    except (TypeError, ValueError):  # a mapping that is no dict, or such a number
        return encoder.encode(_strict(tree))


_encoder = json.JSONEncoder(allow_nan=False)  # to make one for each line took longer than to write the line


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_strict, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


@final
class JsonLines:
    """A file that grows by JSON objects, one on a line; a killed process leaves all that it wrote.

    Args:
        path: made with the first line, if it is not there.

    Raises:
        StorageError: the file cannot be written, when a line is or later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append a line."""
        try:
            with writing(self._path):
                self._file = self._file or open_log(self._path)
                require_same(os.fstat(self._file.fileno()).st_ino, self._path)  # else the line would be lost
                self._file.write(dump_json(columns) + "\n")
        except StorageError:
            with suppress(StorageError):  # it would try again to write what is left
                self.close()
            raise

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            with writing(self._path):
                self._file.close()


def require_same(inode: int, path: Path) -> None:
    """Raise OSError if a file or folder is no longer at its path, which may be another run's by now."""
    with suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            return
    raise OSError(errno.ENOENT, _MOVED, str(path))


def replace_text(path: Path, text: str) -> None:
    """Write a file that appears under its name when it is complete, also in the place of a link.

    Raises:
        StorageError: if it cannot be written.
    """
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path at which to write a file. It gets its name, or is removed if an error occurs.

    Raises:
        StorageError: if it cannot be written.
    """
    with writing(path):
        remove_leftover(path)
        try:
            yield _temporary(path)
            _temporary(path).replace(path)
        finally:
            remove_leftover(path)


def remove_leftover(path: Path) -> None:
    """Remove the half of a file that a killed process left at its temporary path.

    Raises:
        OSError: if it cannot be removed.
    """
    _temporary(path).unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the errors of writing a file into one.

    Raises:
        StorageError: names the file, the reason, and the free space where that is the reason.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file of a run, which may hold anything, into one.

    Raises:
        CheckpointError: names the file, and what is wrong.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error, path)}.") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error!r:.300}.") from error


def storage_error(error: OSError, path: Path) -> StorageError:
    """Make the error of a file that cannot be written."""
    return StorageError(f"{path} cannot be written: {reason(error, path)}.")


def is_full(error: OSError) -> bool:
    """Tell whether the disk has no space left, or none that this user may take."""
    return error.errno in _FULL


def reason(error: OSError, path: Path) -> str:
    """Say why a file cannot be read or written, and how much space is free where there is too little."""
    if error.errno == errno.ELOOP:
        return "it is a link, and a run writes to regular files only. Remove the link"
    said = error.strerror or str(error)
    if not is_full(error):
        return said
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    usage = shutil.disk_usage(folder)
    return f"{said}, {usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB are free in {folder}"


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _open(path: str, flags: int) -> int:
    # A pipe without a partner would be waited for.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return descriptor
