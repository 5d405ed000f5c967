"""Lines of JSON as samples."""

import json
import os
import re
from typing import Any

import numpy as np

from lanewise.data.file_dataset import OnError
from lanewise.data.record_files import RecordFiles
from lanewise.data.source_file import Paths

_MAX_DEPTH = 200
"""Of lists and objects within each other. Python's own limit, of 1,000, counts the calls around it too, which
are others in a loader's worker than in the process that trains."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class JsonLinesDataset(RecordFiles):
    """A dataset of files of which each line is a JSON value; a sample is what `json.loads` gives.

    Where lines begin is found once, and kept in a folder. Then a record of a plain file is read by its place;
    compressed files (.gz, .bz2, .xz, and .zst with the package zstandard) are read in blocks, forward. Empty
    lines count for nothing.

    Args:
        paths: a path, a pattern such as `data/*.jsonl`, a URL of fsspec, or several of them.
        on_error: whether a line that is no JSON or nested more than 200 deep, and a file that cannot be
            decompressed, is an error, or is left out.
        cache_dir: where to keep what tells where lines begin; None: `$XDG_CACHE_HOME/lanewise`, or
            `~/.cache/lanewise`.
        memory_mib: for what is decompressed and waits to be asked for, in MiB, in each process that reads.

    Raises:
        DataError: if there is no file, or one is empty or cannot be read.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        on_error: OnError = "raise",
        cache_dir: str | os.PathLike[str] | None = None,
        memory_mib: float = 256,
    ) -> None:
        super().__init__(paths, b"\n", on_error=on_error, cache_dir=cache_dir, memory_mib=memory_mib)

    def _decode(self, record: bytes) -> Any:
        if record.count(b"[") + record.count(b"{") > _MAX_DEPTH and _depth(record) > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        try:
            return json.loads(record)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is no JSON: {error.msg} (character {error.pos})") from error


def _depth(record: bytes) -> int:
    """Return how deep a line of JSON is nested, also where it turns out to be none later."""
    text = record.decode(json.detect_encoding(record), "surrogatepass").encode("utf-8", "surrogatepass")
    steps = np.frombuffer(_STRING.sub(b"", text).translate(_STEPS, _NO_BRACKETS), np.int8)
    return int(steps.cumsum(dtype=np.int64).max(initial=0))
