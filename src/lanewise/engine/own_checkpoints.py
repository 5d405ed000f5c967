"""Checkpoints for a loop of one's own: files like the trainer's, saved and verified in the same way."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lanewise.checkpoint import CheckpointFolder, Manifest, Saver, load_state
from lanewise.engine.resume import compare, find_newest
from lanewise.engine.state import (
    compare_modules,
    compare_optimizers,
    copy_state,
    restore_optimizer,
    take_optimizer,
)
from lanewise.errors import CheckpointError
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
        self._objects = {**objects, **{f"loss_scale_{n}": scale for n, scale in enumerate(loss_scales)}}
        self._identity = identity
        self._parameters = {
            f"{key}.{name}": parameter
            for key, value in objects.items()
            if isinstance(value, nn.Module)
            for name, parameter in value.named_parameters()
        }
        checkpoints = CheckpointFolder(folder)
        self._saver = Saver(checkpoints, world, keep_last=keep_last, keep_best=0, sign=1)
        self.step = 0
        """The step that comes next: 0, or where the checkpoint was saved."""
        found = find_newest(checkpoints, world)
        if found is not None:
            self._restore(*found)
        elif world.rank == 0:
            checkpoints.remove_leftovers()

    def save(self, step: int) -> None:
        """Begin to save what the objects are before `step`; they may change at once.

        Raises:
            CheckpointError: if something cannot be saved, or the previous save failed.
        """
        manifest = Manifest(step=step, metric=None, identity=self._identity, files=())
        self._saver.save({key: self._take(value) for key, value in self._objects.items()}, manifest)

    def finish(self) -> None:
        """Wait until the last save is on disk."""
        self._saver.finish()

    def _take(self, value: Any) -> Any:
        return take_optimizer(value, self._parameters) if isinstance(value, Optimizer) else value.state_dict()

    def _restore(self, folder: Path, manifest: Manifest) -> None:
        mistakes, _ = compare(self._identity, manifest.identity, allow=())
        state = load_state(folder, manifest)
        mistakes += [f"{key} is not in it" for key in self._objects.keys() - state.keys()]
        mistakes += [
            f"it has a state of {key}, and this run has none" for key in state.keys() - self._objects.keys()
        ]
        for key in self._objects.keys() & state.keys():
            value = self._objects[key]
            if isinstance(value, nn.Module):
                mistakes += compare_modules(value.state_dict(), state[key], key)
            elif isinstance(value, Optimizer):
                mistakes += compare_optimizers(self._take(value), state[key])
        if mistakes:
            raise CheckpointError(f"{folder} is of another run: {'; '.join(sorted(mistakes))}.")
        for key, value in self._objects.items():
            if isinstance(value, nn.Module):
                copy_state(value, state[key])
            elif isinstance(value, Optimizer):
                restore_optimizer(value, state[key])
            else:
                value.load_state_dict(state[key])
        self.step = manifest.step
