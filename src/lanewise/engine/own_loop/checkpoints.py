"""Checkpoints for the user's own loop: files like the trainer's, saved and verified in the same way."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lanewise.checkpoint import CheckpointFolder, Manifest, Saver
from lanewise.engine.state.restore import find_newest, restore
from lanewise.engine.state.run_state import RunState
from lanewise.errors import CheckpointError
from lanewise.precision import LossScale
from lanewise.world.world import World

logger = logging.getLogger(__name__)

_DATASETS = "datasets"
"""Under which an identity has all that `use_dataset` was given: a loop may have several."""


class OwnCheckpoints:
    """Saves the objects of a loop, and puts them where the newest good checkpoint is.

    Collective: every rank must make it, and save.

    Args:
        folder: where the checkpoints are, on a file system that all ranks share.
        world: the processes.
        identity: what identifies the run; checkpoints with another identity belong to another run.
        objects: modules, optimizers of their parameters, and whatever has `state_dict` and `load_state_dict`.
        loss_scales: of fp16, for each prepared model.
        keep_last: how many of the newest checkpoints to keep.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        identity: Mapping[str, Any],
        objects: Mapping[str, Any],
        loss_scales: Sequence[LossScale],
        *,
        keep_last: int,
    ) -> None:
        self._identity = identity
        self._state = RunState({**objects, **{f"loss_scale_{n}": one for n, one in enumerate(loss_scales)}})
        self._state.require_savable()
        checkpoints = CheckpointFolder(folder)
        self._saver = Saver(checkpoints, world, keep_last=keep_last, keep_best=0, sign=1)
        self.step = 0
        """The step that comes next: 0, or where the checkpoint was saved."""
        found = find_newest(checkpoints, world)
        self.datasets: list[Any] = []
        """What identifies those that the run was trained on so far."""
        self._found: Path | None = None
        if found is not None:
            path, manifest = found
            saved = dict(manifest.identity)
            datasets = saved.pop(_DATASETS, [])
            restore(self._state, identity, path, replace(manifest, identity=saved))
            self.step = manifest.step
            self.datasets = datasets if isinstance(datasets, list) else [datasets]
            self._found = path if self.datasets else None
        if world.rank == 0:
            checkpoints.remove_leftovers(logger.warning)

    def use_dataset(self, dataset: Mapping[str, Any]) -> None:
        """Learn which dataset is trained on: the first must be one of those that the checkpoint is of.

        Raises:
            CheckpointError: if it is another one.
        """
        path, self._found = self._found, None
        if dataset in self.datasets:
            return
        if path is not None:
            was = " or ".join(map(str, self.datasets))
            raise CheckpointError(
                f"{path} is of another run.\n  dataset was {was}, and is {dataset} now\n"
                "Use its dataset, or another folder."
            )
        self.datasets.append(dataset)

    def save(self, step: int) -> None:
        """Begin to save what the objects are before `step`; they may change at once.

        Raises:
            CheckpointError: if something cannot be saved, or the previous save failed.
        """
        identity = {**self._identity, _DATASETS: list(self.datasets)}
        manifest = Manifest(step=step, metric=None, identity=identity, files=())
        self._saver.save(self._state.take(), manifest)

    def finish(self) -> None:
        """Wait until the last save is on disk."""
        self._saver.finish()
