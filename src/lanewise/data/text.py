"""Lines and documents of text as samples."""

import os
from typing import Any

from lanewise.data.file_dataset import OnError
from lanewise.data.record_files import RecordFiles
from lanewise.data.source_file import Paths
from lanewise.errors import DataError


class TextDataset(RecordFiles):
    r"""A dataset of texts in UTF-8; a sample is a str.

    Where texts begin is found once, and kept in a folder. Then a text of a plain file is read by its place;
    compressed files (.gz, .bz2, .xz, and .zst with the package zstandard) are read in blocks, forward. Empty
    texts count for nothing.

    Args:
        paths: a path, a pattern such as `data/*.txt`, a URL of fsspec, or several of them.
        separator: stands between two texts, and is not part of them. `"\n"` gives lines (a carriage return at
            their end goes too), `"\n\n"` or `"<|endoftext|>"` documents; None makes each file one document.
        cache_dir: where to keep what tells where texts begin; None: `$XDG_CACHE_HOME/lanewise`, or
            `~/.cache/lanewise`.
        on_error: whether a text that is no UTF-8, and a file that cannot be decompressed, is an error, or is
            left out.
        memory_mib: for what is decompressed and waits to be asked for, in MiB, in each process that reads.

    Raises:
        DataError: if there is no file, or one is empty or cannot be read.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        separator: str | None = "\n",
        cache_dir: str | os.PathLike[str] | None = None,
        on_error: OnError = "raise",
        memory_mib: float = 256,
    ) -> None:
        super().__init__(
            paths, _encoded(separator), on_error=on_error, cache_dir=cache_dir, memory_mib=memory_mib
        )

    def _decode(self, record: bytes) -> str:
        return record.decode()


def _encoded(separator: Any) -> bytes | None:
    if not isinstance(separator, str | None):
        kind = type(separator).__name__
        raise DataError(f"separator is {separator!r}, of type {kind}. It is a str, or None.")
    try:
        return None if separator is None else separator.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"separator is {separator!r}, which UTF-8 cannot write: {error.reason}.") from error
