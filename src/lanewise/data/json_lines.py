"""Lines of JSON as samples."""

import json
import re
from typing import Any, final

import numpy as np

from lanewise.data.record_files import RecordFiles

_MAX_DEPTH = 200
"""How deep lists and objects may lie within each other. Python's own limit of 1,000 counts the calls around
it too, and a loader's worker has other calls than the process that trains."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_scan = json.JSONDecoder().raw_decode


@final
class JsonLinesDataset(RecordFiles):
    """A dataset of files of which each line is a JSON value; a sample is what `json.loads` gives.

    The places where lines begin are found once, and kept in a folder. Then each line of a plain file is read
    from its place; compressed files (.gz, .bz2, .xz, and .zst with the package zstandard) are read forward in
    blocks. Empty lines do not count.

    Args:
        paths: a path, a pattern such as `data/*.jsonl`, a URL of fsspec, or several of them. An archive
            stands for its files that end in .jsonl, .ndjson or .json, sorted by name, without hidden ones: a
            .tar is read as it is, a .zip or a compressed tar is unpacked once into `cache_dir`.
        on_error: whether a line that is not JSON or is nested more than 200 deep, or a file that cannot be
            decompressed, is an error (`raise`) or is left out (`skip`).
        cache_dir: the folder in which to keep where lines begin; None stands for `$XDG_CACHE_HOME/lanewise`,
            or `~/.cache/lanewise`.
        memory_mib: how much memory decompressed lines that were not asked for yet may take, in MiB, in each
            process that reads.
        unpacked_gib: how much an archive that is unpacked may hold, in GiB; None stands for 100 times its
            own size, and at least 1.

    Raises:
        DataError: if there is no file, or one is empty or cannot be read.
    """

    _endings = (".jsonl", ".ndjson", ".json")

    def _decode(self, record: bytes) -> Any:
        may_be_deep = len(record) > _MAX_DEPTH and record.count(b"[") + record.count(b"{") > _MAX_DEPTH
        if may_be_deep and _depth(record) > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        # Of a value in UTF-8 without spaces around it this is what json.loads gives, in less time.
        # On any other line json.loads decides: one in UTF-16 or UTF-32 is no value in UTF-8.
        try:
            text = record.decode()
            value, end = _scan(text)
            if end == len(text):
                return value
        except ValueError:
            pass  # what is wrong is said below
        try:
            return json.loads(record)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON: {error.msg} (character {error.pos})") from error


def _depth(record: bytes) -> int:
    """Return how deep a line of JSON is nested, also where it turns out to be none later."""
    text = record.decode(json.detect_encoding(record), "surrogatepass").encode("utf-8", "surrogatepass")
    steps = np.frombuffer(_STRING.sub(b"", text).translate(_STEPS, _NO_BRACKETS), np.int8)
    return int(steps.cumsum(dtype=np.int64).max(initial=0))
