"""The manifest of a checkpoint: which files it has, and what they must hold."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lanewise.errors import CheckpointError

NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of, and every file in it but the manifest itself."""

    step: int
    """Steps that were taken: training goes on with this one."""
    metric: float | None
    """The value by which checkpoints are compared, of the last evaluation before this one."""
    identity: Mapping[str, Any]
    """What the run was of: lanes, dataset, seed and the like; see `compare`."""
    files: tuple[FileEntry, ...]

    def write(self, folder: Path) -> None:
        """Write it to a folder whose files are there, and make it durable."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, allow_nan=False, indent=1)
        write_durably(folder / NAME, text.encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read what `write` wrote; the files themselves are not looked at.

        Raises:
            CheckpointError: if there is none, or it is not one of ours.
        """
        path = folder / NAME
        try:
            tree = json.loads(path.read_bytes())
            if tree.pop("format") != _FORMAT:
                raise CheckpointError(f"{path} was written by another version of lanewise.")
            files = tuple(FileEntry(**entry) for entry in tree.pop("files"))
            return cls(files=files, **tree)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} has no {NAME}.") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error!r}.") from error

    def verify(self, folder: Path) -> None:
        """Compare every file with its size and checksum.

        Raises:
            CheckpointError: names the first file that is missing, too many, or other than it was.
        """
        names = {entry.name for entry in self.files} | {NAME}
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in names)
        if foreign:
            raise CheckpointError(f"{folder / foreign[0]} does not belong to the checkpoint.")
        for entry in self.files:
            path = folder / entry.name
            try:
                num_bytes = path.stat().st_size
                if num_bytes != entry.num_bytes:
                    raise CheckpointError(f"{path} has {num_bytes} bytes instead of {entry.num_bytes}.")
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
            if digest != entry.sha256:
                raise CheckpointError(f"{path} is damaged: its checksum is another one.")


def write_durably(path: Path, *contents: bytes | memoryview) -> FileEntry:
    """Write a new file, wait until it is on disk, and describe it."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("wb", buffering=0) as file:
        for content in contents:
            view = memoryview(content)
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                while chunk:  # a write may take less than it is given
                    written = file.write(chunk)
                    digest.update(chunk[:written])
                    num_bytes += written
                    chunk = chunk[written:]
        os.fsync(file.fileno())
    return FileEntry(path.name, num_bytes, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_CHUNK = 16 * 2**20
