"""Checkpoints for a loop of one's own: files like the trainer's, saved and verified in the same way."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lanewise.checkpoint import CheckpointFolder, Manifest, Saver
from lanewise.engine.resume import find_newest, restore
from lanewise.engine.state import RunState
from lanewise.precision import LossScale
from lanewise.world.world import World

logger = logging.getLogger(__name__)


class OwnCheckpoints:
    """Saves the objects of a loop, and puts them where the newest good checkpoint is.

    Collective: every rank must make it, and save.

    Args:
        folder: where the checkpoints are, on a file system that all ranks share.
        world: the processes.
        identity: what the run is of: with another one, its checkpoints mean something else.
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
        if found is not None:
            restore(self._state, identity, *found)
            self.step = found[1].step
        if world.rank == 0:
            checkpoints.remove_leftovers(logger.warning)

    def save(self, step: int) -> None:
        """Begin to save what the objects are before `step`; they may change at once.

        Raises:
            CheckpointError: if something cannot be saved, or the previous save failed.
        """
        manifest = Manifest(step=step, metric=None, identity=self._identity, files=())
        self._saver.save(self._state.take(), manifest)

    def finish(self) -> None:
        """Wait until the last save is on disk."""
        self._saver.finish()
