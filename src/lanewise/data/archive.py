"""Archives in the place of the files that they hold: a tar is read as it is, any other is unpacked once."""

import hashlib
import io
import logging
import re
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from fsspec.utils import infer_compression

from lanewise.data.byte_file import ByteFile, tar_members
from lanewise.data.cache_folder import CacheDir, alone, cache_folder
from lanewise.data.file_content import FileContent
from lanewise.data.source_file import Paths, file_name, list_files
from lanewise.data.tar import tar_ranges
from lanewise.errors import DataError

logger = logging.getLogger(__name__)

_ARCHIVE = re.compile(r"\.(zip|tar(\.(gz|bz2|xz))?|tgz|tbz2?|txz)$", re.IGNORECASE)
_CHAINED = re.compile(r"^(?:tar|zip)://(?:\./)?(.+?)::", re.IGNORECASE | re.DOTALL)
"""Begins a URL of a file in an archive."""


def list_contents(
    paths: Paths, endings: Sequence[str], cache_dir: CacheDir = None, unpacked_gib: float | None = None
) -> list[ByteFile]:
    """Return the files in the order in which they are given; in place of an archive those that it holds.

    These are sorted by name; hidden ones and other endings are left out. A tar that is not compressed stays
    as it is. Any other archive is unpacked into the cache folder by the first process that needs it. A name
    that is found in an archive is never a part of a URL.

    Args:
        paths: files and archives.
        endings: those of the files of an archive that count; behind them such a file may end in `.gz` or so.
        cache_dir: the folder in which to unpack; None: see `CacheDir`.
        unpacked_gib: how much an archive that is unpacked may hold; None: 100 times its size, at least 1.

    Raises:
        DataError: if an archive cannot be read or unpacked, or holds no such file; see `list_files` and
            `ByteFile.find` too.
    """
    files: list[str | ByteFile] = []
    for path in list_files(paths):
        *named, of = _CHAINED.split(path)
        name = file_name(of)
        if not _ARCHIVE.search(name):
            files.append(path)
            continue
        found = _found(ByteFile.stored(of), cache_dir, unpacked_gib)
        chosen = named[1:] or [member for member in sorted(found) if _counts(member, endings)]
        if not found.keys() & chosen:
            raise DataError(
                f"{of} has no file {named[1]}."
                if named
                else f"{path} holds no file that ends in {' or '.join(endings)}: it holds "
                f"{', '.join(sorted(found)[:5]) or 'none'}. Name those that are meant, as in "
                f"{'zip' if name.lower().endswith('.zip') else 'tar'}://*.ENDING::{path}."
            )
        files += map(found.__getitem__, chosen)
    with ThreadPoolExecutor(16) as pool:  # a network's file system takes its time for each
        stored = pool.map(ByteFile.find, [file for file in files if isinstance(file, str)])
        return [next(stored) if isinstance(file, str) else file.require_content() for file in files]


def _counts(name: str, endings: Sequence[str]) -> bool:
    is_hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
    plain = name.rpartition(".")[0] if infer_compression(name) else name
    return not is_hidden and plain.endswith(tuple(endings))


def _found(
    archive: ByteFile, cache_dir: CacheDir, max_gib: float | None
) -> Mapping[str, str] | Mapping[str, ByteFile]:
    """Return the files of an archive by their names there: ranges of a tar, or paths of what was unpacked."""
    if not archive.name.lower().endswith(".tar"):
        unpacked = _unpacked(archive, cache_dir, max_gib)
        if unpacked.is_dir():
            paths = [path for path in unpacked.rglob("*") if path.is_file()]
            return {path.relative_to(unpacked).as_posix(): str(path) for path in paths}
        archive = ByteFile.stored(str(unpacked))
    return tar_members(archive)


def _unpacked(archive: ByteFile, cache_dir: CacheDir, max_gib: float | None) -> Path:
    """Return the folder of an unpacked zip, or a tar that is not compressed; unpack, unless that was done."""
    try:
        cache = cache_folder(cache_dir)
        key = repr((archive.path, archive.size, archive.stamp, "checked")).encode()
        folder = cache / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.unpacked"
        cache.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            with alone(folder.with_suffix(".lock"), f"unpack {archive.path}"):
                if not folder.is_dir():
                    _unpack(archive, folder, max_gib)
    except DataError:
        raise
    except Exception as error:  # of any format, of the disk, or no home folder
        raise DataError(
            f"{archive.path} cannot be unpacked into the cache folder: {type(error).__name__}: {error}. "
            "Unpack it elsewhere, and name its files; if it is cut or damaged, write it again."
        ) from error
    return folder / PurePosixPath(archive.name).stem


def _unpack(archive: ByteFile, folder: Path, max_gib: float | None) -> None:
    """Unpack an archive into a folder, which appears when it is complete."""
    begin, num_bytes = time.monotonic(), 0
    most = float(max_gib or max(1, 100 * archive.size / 2**30)) * 2**30  # a text has 10 times its packed size
    with TemporaryDirectory(dir=folder.parent, suffix=".new") as temporary:
        new = Path(temporary, "files")
        new.mkdir()
        for size in _write(archive, new / PurePosixPath(archive.name).stem):
            num_bytes += size
            if num_bytes > most:
                raise DataError(
                    f"{archive.path} has {archive.size:,} bytes, and holds more than {most / 2**30:.1f} GiB. "
                    "If that is as it should be, give the dataset a larger unpacked_gib."
                )
        archive.check()
        new.rename(folder)
    seconds, mib = time.monotonic() - begin, num_bytes / 2**20
    logger.info("unpacked %s, %.1f MiB, into %s in %.1f s", archive.path, mib, folder, seconds)


def _write(archive: ByteFile, path: Path) -> Iterator[int]:
    """Write what is in an archive, which must be whole, in pieces, each after its size was yielded."""
    if not archive.name.lower().endswith(".zip"):
        with FileContent(archive, lambda _: None) as content, path.open("w+b") as tar:
            while piece := content.read(2**20):
                yield len(piece)
                tar.write(piece)
            tar_ranges(tar)
        return
    with zipfile.ZipFile(io.BufferedReader(archive.stream(lambda _: None))) as zipped:
        path.mkdir()
        for entry in zipped.infolist():
            # The list of a zip has no checksum: a bit can make a comment of an entry, or a folder of a file.
            if b"PK\1\2" in entry.comment or (entry.is_dir() and entry.file_size):
                raise zipfile.BadZipFile(f"the entry {entry.filename} is damaged")
            yield entry.file_size
            zipped.extract(entry, path)
