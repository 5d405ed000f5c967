"""The manifest of a checkpoint: the files that it has, with their sizes and checksums."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from lanewise.errors import CheckpointError
from lanewise.processes.watch.heartbeat import heartbeat
from lanewise.processes.watch.typed_json import as_type
from lanewise.runs.file import open_regular, read_json, reading

_PIECE_BYTES = 2**24
"""The size of the pieces in which a file is written and read; each piece is progress."""
NAME = "manifest.json"
_FORMAT = 1
_MAX_BYTES = 16 * 2**20
"""The limit for a manifest, which is read before it can be trusted; 100,000 files take about as much."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The run and the step that a checkpoint belongs to, and every file in it except the manifest itself."""

    step: Annotated[int, range(10**18)]
    """The number of steps that were taken: training goes on with the step of this number."""
    metric: float | None
    """The value by which checkpoints are compared, from the last evaluation before this checkpoint."""
    identity: Mapping[str, Any]
    """What identifies the run: its lanes, dataset, seed and the like."""
    files: tuple[FileEntry, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    """The digest of each tensor, on the devices that saved it; empty where the run has none."""

    def write(self, folder: Path) -> None:
        """Write it to a folder whose files are there, and make it durable."""
        tree = asdict(self)
        if not self.digests:
            del tree["digests"]
        whole = {"format": _FORMAT, "sha256": _digest(tree), "manifest": tree}
        write_json(folder / NAME, json.dumps(whole, allow_nan=False, indent=1), _MAX_BYTES)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder, without a look at the other files.

        Raises:
            CheckpointError: if there is none, or it is damaged.
        """
        path = folder / NAME
        with reading(path):
            try:
                whole = read_json(path, _MAX_BYTES)
            except FileNotFoundError:
                raise CheckpointError(f"{folder} has no {NAME}.") from None
            if whole["format"] != _FORMAT:
                raise CheckpointError(f"{path} was written by another version of lanewise.")
            tree = whole["manifest"]
            if whole["sha256"] != _digest(tree):
                raise CheckpointError(f"{path} is damaged: its checksum does not match.")
            return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: object) -> "Manifest":
        """Make it of what `asdict` made of one; raise ValueError if something else did."""
        manifest: Manifest = as_type({"digests": {}, **tree} if isinstance(tree, dict) else tree, cls)
        names = [file.name for file in manifest.files]
        if not all(map(_is_name, names)) or len({NAME, *names}) <= len(names):
            raise ValueError("a file lies elsewhere, or is named twice")
        return manifest

    def verify(self, folder: Path) -> None:
        """Compare every file with its size and checksum.

        Raises:
            CheckpointError: names the first file that is missing, is not of the checkpoint, or has changed.
        """
        names = {entry.name for entry in self.files} | {NAME}
        with reading(folder):
            foreign = sorted(path.name for path in folder.iterdir() if path.name not in names)
        if foreign:
            raise CheckpointError(f"{folder / foreign[0]} does not belong to the checkpoint.")
        for entry in self.files:
            path = folder / entry.name
            with reading(path):
                with open_regular(path) as file:
                    num_bytes = os.fstat(file.fileno()).st_size
                    if num_bytes != entry.num_bytes:
                        raise CheckpointError(f"{path} has {num_bytes} bytes instead of {entry.num_bytes}.")
                    digest = hashlib.sha256()
                    for piece in iter(lambda: file.read(_PIECE_BYTES), b""):
                        digest.update(piece)
                        heartbeat.num_pieces += 1
                if digest.hexdigest() != entry.sha256:
                    raise CheckpointError(f"{path} is damaged: its checksum does not match.")


def _is_name(text: str) -> bool:
    """Tell whether a save could have given this name to a file of the folder."""
    return Path(text).name == text and text.isascii() and text.isprintable()


def write_json(path: Path, text: str, max_bytes: int) -> FileEntry:
    """Write text durably that `read_json` reads.

    Raises:
        CheckpointError: if it is longer than that.
    """
    if len(text) > max_bytes:
        raise CheckpointError(f"{path.name} has {len(text)} bytes, and more than {max_bytes} are not read.")
    return write_durably(path, text.encode())


def _digest(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True, allow_nan=False).encode()).hexdigest()


def write_durably(path: Path, *contents: bytes | memoryview) -> FileEntry:
    """Write a new file, wait until it is on disk, and describe it. An older file of its name is unlinked."""
    path.unlink(missing_ok=True)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for content in contents:
            for start in range(0, len(content), _PIECE_BYTES):
                piece = memoryview(content)[start : start + _PIECE_BYTES]
                file.write(piece)
                digest.update(piece)
                heartbeat.num_pieces += 1
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, sum(map(len, contents)), digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
