"""Archives in the place of the files that they hold: a tar is read as it is, any other is unpacked once."""

import hashlib
import io
import logging
import re
import shutil
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from fsspec.utils import infer_compression

from lanewise.data.byte_file import ByteFile, tar_members
from lanewise.data.cache_folder import CacheDir, alone, cache_folder
from lanewise.data.source_file import Paths, file_name, list_files
from lanewise.errors import DataError

logger = logging.getLogger(__name__)

_TAR = re.compile(r"\.tar$", re.IGNORECASE)
_PACKED = re.compile(r"\.(zip|tar\.(gz|bz2|xz)|tgz|tbz2?|txz)$", re.IGNORECASE)
_MOST_SHOWN = 5


def list_contents(paths: Paths, endings: Sequence[str], cache_dir: CacheDir = None) -> list[str]:
    """Return the files in the order in which they are given; in place of an archive those that it holds.

    These are sorted by name; hidden ones and other endings are left out. A tar that is not compressed stays
    as it is. Any other archive is unpacked into the cache folder by the first process that needs it.

    Args:
        paths: files and archives.
        endings: those of the files of an archive that count; behind them such a file may end in `.gz` or so.
        cache_dir: the folder in which to unpack; None: see `CacheDir`.

    Raises:
        DataError: if an archive cannot be read or unpacked, or holds no such file; see `list_files` too.
    """
    files: list[str] = []
    for path in list_files(paths):
        name = file_name(path)
        is_tar = _TAR.search(name) is not None
        if "::" in path or not (is_tar or _PACKED.search(name)):  # a chained URL names a file in an archive
            files.append(path)
            continue
        archive = ByteFile.stored(path)
        folder = None if is_tar else _unpacked(archive, cache_dir)
        names = sorted(tar_members(archive) if folder is None else _files_in(folder))
        chosen = [name for name in names if _counts(name, endings)]
        if not chosen:
            protocol = "zip" if name.lower().endswith(".zip") else "tar"
            raise DataError(
                f"{path} holds no file that ends in {' or '.join(endings)}: it holds "
                f"{', '.join(names[:_MOST_SHOWN]) or 'none'}. Name those that are meant, as in "
                f"{protocol}://*.ENDING::{path}."
            )
        files += [
            f"tar://{name}::{archive.path}" if folder is None else f"{folder / name}" for name in chosen
        ]
    return files


def _counts(name: str, endings: Sequence[str]) -> bool:
    is_hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
    plain = name.rpartition(".")[0] if infer_compression(name) else name
    return not is_hidden and plain.endswith(tuple(endings))


def _files_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _unpacked(archive: ByteFile, cache_dir: CacheDir) -> Path:
    """Return the folder in which an archive is unpacked; unpack it, unless a process has done so."""
    try:
        cache = cache_folder(cache_dir)
        key = repr((archive.path, archive.size, archive.stamp)).encode()
        folder = cache / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.unpacked"
        if folder.is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_suffix(".lock"), f"unpack {archive.path}"):
            if not folder.is_dir():
                _unpack(archive, folder)
    except DataError:
        raise
    except Exception as error:  # of any format, of the disk, or no home folder
        raise DataError(
            f"{archive.path} cannot be unpacked into the cache folder: {type(error).__name__}: {error}. "
            "Unpack it elsewhere, and name its files."
        ) from error
    return folder


def _unpack(archive: ByteFile, folder: Path) -> None:
    """Unpack an archive into a folder, which appears when it is complete."""
    begin, num_files, num_bytes = time.monotonic(), 0, 0
    with TemporaryDirectory(dir=folder.parent, suffix=".new") as temporary:
        new = Path(temporary, "files")
        new.mkdir()
        for name, content in _contents(archive):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise DataError(f"{archive.path} holds {name}, which is outside of it. Write it again.")
            file = new / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                shutil.copyfileobj(content, out)
                num_files, num_bytes = num_files + 1, num_bytes + out.tell()
        archive.check()
        new.rename(folder)
    logger.info(
        "unpacked %s, %s files of %.1f MiB, into %s in %.1f s",
        archive.path,
        f"{num_files:,}",
        num_bytes / 2**20,
        folder,
        time.monotonic() - begin,
    )


def _contents(archive: ByteFile) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and the content of each file of an archive; links and the like are none."""
    with ExitStack() as stack:
        stored = stack.enter_context(io.BufferedReader(archive.stream(lambda _: None)))
        if file_name(archive.path).lower().endswith(".zip"):
            zipped = stack.enter_context(zipfile.ZipFile(stored))
            for entry in zipped.infolist():
                if not entry.is_dir():
                    with zipped.open(entry) as content:
                        yield entry.filename, content
        else:
            tar = stack.enter_context(tarfile.open(fileobj=stored, mode="r|*"))
            for member in tar:
                if member.isfile():
                    unpacked = tar.extractfile(member)
                    assert unpacked is not None, "it is a file"
                    yield member.name, unpacked
