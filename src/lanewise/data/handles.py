"""Finds the open files and connections of a dataset, which a process must not share with a fork of it."""

import io
import sqlite3
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset

from lanewise.errors import DataError


def open_handles(dataset: object) -> Iterator[tuple[str, Any]]:
    """Yield what is open among the attributes of a dataset, and of datasets in it, with its name."""
    datasets = [dataset]
    for owner in datasets:  # to which those in it are added
        for name, value in getattr(owner, "__dict__", {}).items():
            for inner in value if isinstance(value, list | tuple) else [value]:  # as of a ConcatDataset
                if isinstance(inner, Dataset) and not any(inner is known for known in datasets):
                    datasets.append(inner)
            if _is_open(value):
                yield f"{type(owner).__name__}.{name}", value


def require_own_handles(dataset: object, inherited: Sequence[object]) -> None:
    """Raise DataError if a dataset still has a handle that it had before this process was forked.

    Args:
        dataset: after a sample was read of it, for which it may have opened its handles anew.
        inherited: the handles that were open before.
    """
    for name, value in open_handles(dataset):
        if any(value is other for other in inherited):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise DataError(
                f"{name} ({kind}) was opened before the loader workers were forked, and they share its "
                "place in the file, so that samples can be mixed up or damaged. Open it where a sample is "
                "read, anew in each process: by os.getpid() (docs/data.md#files-that-stay-open shows how). "
                "Or load in the training process: data.num_workers 0."
            )


def _is_open(value: Any) -> bool:
    if isinstance(value, zipfile.ZipFile):
        return _is_open(value.fp)
    if isinstance(value, tarfile.TarFile):
        return _is_open(value.fileobj)
    if isinstance(value, io.IOBase):
        is_in_memory = isinstance(value, io.BytesIO | io.StringIO)
        return not (is_in_memory or value.closed) and value.readable()
    h5py, lmdb = sys.modules.get("h5py"), sys.modules.get("lmdb")
    if h5py is not None and isinstance(value, h5py.File):
        return bool(value)
    if lmdb is not None and isinstance(value, lmdb.Environment):
        try:
            value.path()
        except lmdb.Error:  # it was closed
            return False
        return True
    return isinstance(value, sqlite3.Connection)
