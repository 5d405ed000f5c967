"""Which files a dataset reads: paths, patterns and URLs, as a user writes them."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

import fsspec

from lanewise.errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a pattern such as `data/*.jsonl`, a URL of fsspec, or several of them."""


def find_files(paths: Paths) -> list[str]:
    """Return the files that paths and patterns name: absolute paths, and URLs as they are.

    What a pattern finds is sorted by name, so that it is in the same order everywhere; several patterns stay
    in the order in which they are given. `**` goes down into folders.

    Raises:
        DataError: if a path is no file, a pattern finds none, or there is no path at all.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise DataError("There is no path to read data from: the sequence of paths is empty.")
    return [file for path in several for file in _expand(os.fspath(path))]


def is_remote(path: str) -> bool:
    """Tell a URL from a local path."""
    return "://" in path


def _expand(path: str) -> list[str]:
    path = path.removeprefix("file://")
    if is_remote(path):
        return _expand_url(path)
    absolute = Path(path).expanduser().absolute()
    if absolute.is_file():  # whatever special characters its name has
        return [str(absolute)]
    if absolute.is_dir():
        raise DataError(f"{path} is a folder. Say which files of it to read, as in {absolute / '*'}.")
    if not glob.has_magic(path):
        raise DataError(f"{path} does not exist. Correct the path; it is relative to {Path.cwd()}.")
    found = glob.glob(str(absolute), recursive=True)  # noqa: PTH207 - Path's gives hidden files too
    return _sorted(path, [file for file in found if Path(file).is_file()])


def _expand_url(url: str) -> list[str]:
    if not glob.has_magic(url.partition("://")[2]):
        return [url]
    try:
        file_system, pattern = fsspec.core.url_to_fs(url)
        found = [file_system.unstrip_protocol(name) for name in file_system.glob(pattern)]
    except Exception as error:  # of any file system
        raise DataError(f"{url} cannot be listed: {error}.") from error
    return _sorted(url, found)


def _sorted(pattern: str, found: list[str]) -> list[str]:
    if not found:
        raise DataError(f"{pattern} finds no file. Correct the pattern, or give the paths.")
    return sorted(found)
