"""Checkpoints for the user's own loop: files like the trainer's, saved and verified in the same way."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from lanewise.checkpoint.folder import CheckpointFolder
from lanewise.checkpoint.manifest import Manifest
from lanewise.checkpoint.saver import Saver
from lanewise.data import digest
from lanewise.engine.own_loop.streams import OwnStreams
from lanewise.engine.state.restore import find_newest, restore
from lanewise.engine.state.run_state import RunState
from lanewise.errors import CheckpointError
from lanewise.precision import LossScale
from lanewise.world.encode import TensorTable, encode
from lanewise.world.world import World

logger = logging.getLogger(__name__)

_STREAMS = "lanewise_streams"
_DATASETS = "datasets"
"""The key of an identity for all datasets that were given to `use_dataset`: a loop may have several."""


@final
class OwnCheckpoints:
    """Restores the objects of a loop from the newest good checkpoint, and saves further checkpoints.

    Collective: every rank must construct it, and call `save`.

    Args:
        folder: the folder of the checkpoints, on a file system that all ranks share.
        world: the processes.
        identity: the identity of the run; checkpoints with another identity are of another run.
        objects: modules, optimizers of their parameters, and other objects with `state_dict` and
            `load_state_dict`.
        loss_scales: the loss scale of each prepared model; empty if the precision is not fp16.
        prepared: the prepared models, which are known to be equal on all ranks.
        streams: the streams of the loop.
        keep_last: how many of the newest checkpoints to keep.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        identity: Mapping[str, Any],
        objects: Mapping[str, Any],
        loss_scales: Sequence[LossScale],
        prepared: Collection[nn.Module],
        streams: OwnStreams,
        *,
        keep_last: int,
    ) -> None:
        self._identity = identity
        scales = {f"loss_scale_{number}": one for number, one in enumerate(loss_scales)}
        self._state = RunState({**objects, **scales, _STREAMS: streams}, may_lack=(_STREAMS,))
        self._state.require_savable()
        self._world = world
        # An optimizer is equal where its module is, which is saved as well.
        self._compared = [
            key
            for key, value in objects.items()
            if not isinstance(value, Optimizer) and not (isinstance(value, nn.Module) and value in prepared)
        ]
        checkpoints = CheckpointFolder(folder)
        self._saver = Saver(checkpoints, world, keep_last=keep_last, keep_best=0, sign=1)
        self.step = 0
        """The next step: that of the checkpoint, or 0 without one."""
        found = find_newest(checkpoints, world)
        self.datasets: list[Any] = []
        """The identities of the datasets on which the run was trained so far."""
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
        """Add the identity of a dataset; the first one must be in the checkpoint.

        Raises:
            CheckpointError: if the first one is not in the checkpoint.
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
        """Begin to save the state of the objects before `step`; they may change as soon as this returns.

        Raises:
            CheckpointError: if a value cannot be saved, or differs between ranks.
            StorageError: if the previous save failed.
        """
        state = self._state.take()
        self._require_equal(state)
        identity = {**self._identity, _DATASETS: list(self.datasets)}
        manifest = Manifest(step=step, metric=None, identity=identity, files=())
        self._saver.save(state, manifest)

    def _require_equal(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if an object whose state only the user knows differs between ranks.

        A checkpoint has one copy of it, which would be restored everywhere.
        """
        if self._world.world_size == 1 or not self._compared:
            return
        own = {}
        for key in self._compared:
            tensors = TensorTable()
            tree = json.dumps(encode(state[key], key, tensors), sort_keys=True)
            own[key] = digest(tree, sorted((name, tensors[name]) for name in tensors.keys() - tensors.held))
        for rank, theirs in enumerate(self._world.all_gather_tree(own)):
            if differing := [key for key in self._compared if theirs[key] != own[key]]:
                raise CheckpointError(
                    f"the state of {differing[0]} differs between processes (ranks {self._world.rank} and "
                    f"{rank}), and a checkpoint holds one state for all. Keep what belongs to a lane in a "
                    "form that is the same on every process, or gather it from all of them before saving."
                )

    def finish(self) -> None:
        """Wait until the last save is on disk."""
        self._saver.finish()
