"""Lines and documents of text as samples."""

from typing import Any, final

from lanewise.data.cache_folder import CacheDir
from lanewise.data.file_dataset import OnError
from lanewise.data.record_files import RecordFiles
from lanewise.data.source_file import Paths
from lanewise.errors import DataError


@final
class TextDataset(RecordFiles):
    r"""A dataset of texts in UTF-8; a sample is a str.

    The places where texts begin are found once, and kept in a folder. Then each text of a plain file is read
    from its place; compressed files (.gz, .bz2, .xz, and .zst with the package zstandard) are read forward in
    blocks. Empty texts do not count. A byte order mark at the beginning of a file is not part of its text.

    Args:
        paths: a path, a pattern such as `data/*.txt`, a URL of fsspec, or several of them. An archive stands
            for its files that end in .txt, sorted by name and without hidden ones: a .tar is
            read as it is, a .zip or a compressed tar is unpacked once into `cache_dir`.
        separator: stands between two texts, and is not part of them. `"\n"` gives lines (without a carriage
            return at their end), `"\n\n"` or `"<|endoftext|>"` documents; None makes each file one document.
        cache_dir: the folder in which to keep where texts begin; None stands for `$XDG_CACHE_HOME/lanewise`,
            or `~/.cache/lanewise`.
        on_error: whether a text that is not UTF-8, or a file that cannot be decompressed, is an error
            (`raise`) or is left out (`skip`).
        memory_mib: how much memory decompressed texts that were not asked for yet may take, in MiB, in each
            process that reads.
        unpacked_gib: how much an archive that is unpacked may hold, in GiB; None stands for 100 times its
            own size, and at least 1.

    Raises:
        DataError: if there is no file, or one is empty or cannot be read.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        separator: str | None = "\n",
        cache_dir: CacheDir = None,
        on_error: OnError = "raise",
        memory_mib: float = 256,
        unpacked_gib: float | None = None,
    ) -> None:
        self._separator = _encoded(separator)
        super().__init__(
            paths, on_error=on_error, cache_dir=cache_dir, memory_mib=memory_mib, unpacked_gib=unpacked_gib
        )

    def _decode(self, record: bytes) -> str:
        # Other records begin behind the mark: find_records leaves it out.
        return record.decode("utf-8-sig" if self._separator is None else "utf-8")


def _encoded(separator: Any) -> bytes | None:
    if not isinstance(separator, str | None):
        kind = type(separator).__name__
        raise DataError(f"separator is {separator!r}, of type {kind}. It is a str, or None.")
    try:
        return None if separator is None else separator.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"separator is {separator!r}, which UTF-8 cannot write: {error.reason}.") from error
