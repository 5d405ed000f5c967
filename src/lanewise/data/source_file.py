"""The files of a dataset, on this machine or behind fsspec URLs."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lanewise.errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a glob, or several of them; each local or an fsspec URL."""


def is_remote(path: str) -> bool:
    """Tell whether a path is an fsspec URL; no absolute path is one, whatever the names of its folders."""
    return not path.startswith("/") and ("://" in path or "::" in path)


def file_name(path: str) -> str:
    """Return what names the file: a path itself, and of a chained URL the first part that is a URL."""
    parts = path.split("::") if is_remote(path) else [path]
    return next((part for part in parts if "://" in part), parts[-1])


def list_files(paths: Paths) -> list[str]:
    """Return the files in the order in which they are given, and those of a glob sorted by name.

    Raises:
        DataError: if a pattern matches no file, a path is a folder, something else than a path is given, or
            fsspec cannot read such URLs.
    """
    given = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str | bytes) else [paths]
    if not given:
        raise DataError("The dataset has no files: paths is empty. Give it a path or a glob.")
    for path in given:
        if not isinstance(path, str | os.PathLike):
            raise DataError(
                f"{path!r} is not a path: it is of type {type(path).__name__}. Give a str or a Path."
            )
    return [file for path in given for file in _matches(os.fspath(path))]


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, one object for each process, and the name of the file in it.

    Raises:
        DataError: if fsspec knows no such file system, or it cannot be reached.
    """
    import fsspec  # noqa: PLC0415 - takes 50 ms, which most runs don't need

    try:
        files, name = fsspec.core.url_to_fs(url)
    except Exception as error:  # of any file system
        raise _cannot_be_opened(url, error) from error
    return files, name


def _matches(path: str) -> list[str]:
    if is_remote(path):
        files, pattern = file_system(path)
        if not any(sign in pattern for sign in "*["):  # a question mark belongs to the URL
            return [path]
        before, is_found, after = path.partition(pattern)  # a host may stand before it, an archive after it
        try:
            names = sorted(files.glob(pattern))
        except Exception as error:  # of any file system
            raise _cannot_be_opened(path, error) from error
        if chained := next((name for name in names if "::" in name), None):
            raise DataError(f"{path} matches {chained}, of which a part would be read as a URL. Rename it.")
        found = [f"{before}{name}{after}" if is_found else files.unstrip_protocol(name) for name in names]
    elif Path(path).is_dir():
        raise DataError(f"{path} is a folder. Name the files in it, as in {Path(path, '*')}.")
    elif not glob.has_magic(path) or Path(path).exists():
        return [path]
    else:
        paths = map(Path, glob.glob(path, recursive=True))  # noqa: PTH207
        found = sorted(str(file.absolute()) for file in paths if not file.is_dir())  # no name makes it a URL
    if not found:
        raise DataError(f"No file matches {path}. The working directory is {Path.cwd()}.")
    return found


def _cannot_be_opened(url: str, error: Exception) -> DataError:
    return DataError(f"{url} cannot be opened: {type(error).__name__}: {error}.")
