"""The folder of a run's checkpoints: finds the good ones, and removes old ones."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

from lanewise.errors import CheckpointError
from lanewise.runs.checkpoint.manifest import Manifest, sync_folder
from lanewise.runs.file import reading, writing
from lanewise.runs.jumps import Jumps

_NAME = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,17})")
_TEMPORARY = re.compile(rf"{_NAME.pattern}\.(tmp|old)-[0-9a-z]+")


def read_good(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and verify that every file is as it was written.

    Raises:
        CheckpointError: says what is not as it was written.
    """
    manifest = Manifest.read(folder)
    match = _NAME.fullmatch(folder.name)
    if match is not None and int(match[1]) != manifest.step:
        raise CheckpointError(f"{folder} holds the checkpoint of step {manifest.step}.")
    manifest.verify(folder)
    return manifest


@final
class CheckpointFolder:
    """`checkpoints/step-000500/` and its like.

    A checkpoint is written under a temporary name, and renamed when it is complete and on disk. So one with
    the final name was complete once; `Manifest.verify` tells whether it still is.

    Args:
        path: the folder.
        up_to: those of more steps are left out; None: none is.
    """

    def __init__(self, path: Path, up_to: int | None = None) -> None:
        self.path = path
        self._up_to = up_to
        self.jumps = Jumps()
        """Where the loss jumped: `prune` keeps the checkpoints before."""

    def of_step(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.path / f"step-{step:06d}"

    def temporary(self, step: int, token: str) -> Path:
        """Return the path of a checkpoint while it is being written."""
        return self.path / f"step-{step:06d}.tmp-{token}"

    def publish(self, temporary: Path, step: int) -> None:
        """Give a complete checkpoint its name, and remove a bad one that had it."""
        final = self.of_step(step)
        aside = _aside(final)
        if os.path.lexists(final):
            final.rename(aside)
        temporary.rename(final)
        sync_folder(self.path)
        if _is_folder(aside):
            shutil.rmtree(aside)

    def all(self) -> list[Path]:
        """List what has the name of a checkpoint, the newest first.

        Raises:
            CheckpointError: if the folder cannot be read.
        """
        steps = {int(match[1]): path for path in self._entries() if (match := _NAME.fullmatch(path.name))}
        return [
            steps[step] for step in sorted(steps, reverse=True) if self._up_to is None or step <= self._up_to
        ]

    def _entries(self) -> list[Path]:
        """List what is in the folder; nothing if it is not there."""
        with reading(self.path), suppress(FileNotFoundError):
            return sorted(self.path.iterdir())
        return []

    def read(self) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
        """Yield the checkpoints, the newest first: each one's manifest, or the error that it is not good.

        A checkpoint that a run removes meanwhile is left out: it is not damaged.
        """
        for folder in self.all():
            try:
                yield folder, read_good(folder)
            except CheckpointError as error:
                if os.path.lexists(folder):
                    yield folder, error

    def newest_good(self, warn: Callable[[str], None]) -> tuple[Path, Manifest] | None:
        """Find the newest checkpoint that verifies.

        Args:
            warn: is called with a text for each one that is skipped.

        Returns:
            Its folder and manifest; None if there is no checkpoint at all.

        Raises:
            CheckpointError: if there are some, and all are bad. Nothing is deleted.
        """
        num_bad = 0
        for folder, found in self.read():
            if isinstance(found, Manifest):
                return folder, found
            num_bad += 1
            warn(f"skipping a checkpoint: {found}")
        if num_bad:
            raise CheckpointError(
                f"none of the {num_bad} checkpoints in {self.path} is good. Nothing was deleted. "
                "Start anew with another --train.run_dir."
            )
        if self.all():  # newer ones: all that were there a moment ago are gone
            return self.newest_good(warn)
        return None

    def remove_leftovers(self, warn: Callable[[str], None]) -> None:
        """Remove the folders that were left by saves that were killed.

        Args:
            warn: is called with a text that names folders that look like checkpoints and are not; they stay.

        Raises:
            CheckpointError: if the folder cannot be read.
            StorageError: if something cannot be removed.
        """
        strange = []
        for path in self._entries():
            if _TEMPORARY.fullmatch(path.name) and _is_folder(path):
                with writing(path):
                    shutil.rmtree(path)
            elif path.name.startswith("step-") and not _NAME.fullmatch(path.name):
                strange.append(path.name)
        if strange:
            warn(f"not deleted from {self.path}, since no save made it: {', '.join(strange)}")

    def prune(self, step: int, *, keep_last: int, keep_best: int, sign: int) -> None:
        """Remove all but the newest checkpoints, those with the best metric, and those before jumps.

        Call it after a new one was published and verified. Later ones stay and do not count: they are
        damaged, since otherwise the run would have gone on from them.

        Args:
            step: of the new one.
            keep_last: how many of the newest to keep.
            keep_best: how many to keep of those with the best metric.
            sign: 1 if more is better, -1 if less is.
        """
        newest = self.of_step(step)
        folders = [folder for folder in self.all() if _is_folder(folder)]  # what a user linked is the user's
        folders = folders[folders.index(newest) :]
        kept = set(folders[:keep_last])
        if keep_best:
            metrics: dict[Path, float] = {}
            best = Manifest.read(newest).identity.get("best")  # which metric it is
            for folder in folders:
                with suppress(CheckpointError):
                    manifest = Manifest.read(folder)
                    if manifest.metric is not None and manifest.identity.get("best") == best:
                        metrics[folder] = sign * manifest.metric
            kept |= set(sorted(metrics, key=lambda folder: -metrics[folder])[:keep_best])
        for jump in self.jumps.steps[-3:]:  # not of all: a run that jumps often would fill the disk
            kept.update([folder for folder in folders if int(folder.name[5:]) < jump][:1])
        for folder in folders:
            if folder not in kept:
                # Renamed first: a removal that is killed must not leave half a checkpoint under its name.
                aside = _aside(folder)
                folder.rename(aside)
                shutil.rmtree(aside)


def _aside(path: Path) -> Path:
    """Return a free name for a folder that is about to be removed."""
    return path.with_name(f"{path.name}.old-{os.urandom(4).hex()}")


def _is_folder(path: Path) -> bool:
    """Tell whether a path is a folder itself, and not a link to one."""
    return path.is_dir() and not path.is_symlink()
