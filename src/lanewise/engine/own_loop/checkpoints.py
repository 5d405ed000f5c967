"""Checkpoints for the user's own loop: files like the trainer's, saved and verified in the same way."""

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, final

from torch.optim import Optimizer

from lanewise.data import digest
from lanewise.engine.own_loop.datasets import OwnDatasets
from lanewise.engine.own_loop.steps import Prepared
from lanewise.engine.state.restore import find_newest, restore
from lanewise.engine.state.run_state import LEFT_OUT, RunState
from lanewise.errors import CheckpointError, LanewiseError, RunDirError, describe
from lanewise.processes.device.tensor_bytes import checksum
from lanewise.processes.world.digests import gather_digests
from lanewise.processes.world.encode import TensorTable, encode
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver
from lanewise.runs.dir import lock_folder
from lanewise.runs.file import writing

logger = logging.getLogger(__name__)

_STREAMS = "lanewise_streams"
_DATASETS = "datasets"
"""The key of an identity for all datasets of the loop: it may have several."""
_CLAIMED: "dict[Path, OwnCheckpoints]" = {}
"""Who in this process saves to a folder, until its `Lanes` are closed."""


@final
@dataclass(eq=False)
class OwnCheckpoints:
    """Restores the objects of a loop from the newest good checkpoint, and saves further checkpoints.

    Collective: every rank must construct it, and call `save`.
    """

    folder: Path
    """The folder of the checkpoints, on a file system that all ranks share."""
    world: World
    """The processes."""
    identity: Mapping[str, Any]
    """The identity of the run; checkpoints with another identity are of another run."""
    objects: Mapping[str, Any]
    """Modules, optimizers of their parameters, and other objects with `state_dict` and `load_state_dict`."""
    prepared: Prepared
    """The prepared models."""
    datasets: OwnDatasets
    """The datasets of the loop."""
    _: KW_ONLY
    keep_last: int
    """How many of the newest checkpoints to keep."""
    before_step: int | None = None
    """The index of a step to see again: no later checkpoint is restored, and nothing is saved or deleted."""

    def __post_init__(self) -> None:
        messages = [pass_.message for pass_ in self.prepared.passes.values()]
        scales = {f"loss_scale_{number}": message.loss_scale for number, message in enumerate(messages)}
        losses = {f"losses_{number}": message for number, message in enumerate(messages)}
        self._state = RunState(
            {**self.objects, **scales, **losses, _STREAMS: self.datasets},
            may_lack=(*losses, _STREAMS),
            digests=self.prepared.digests,
        )
        self._state.require_savable()
        # An optimizer is equal where its module is, which is saved as well.
        self._compared = [key for key, value in self.objects.items() if not isinstance(value, Optimizer)]
        checkpoints = CheckpointFolder(self.folder, self.before_step)
        self._saver = Saver(checkpoints, self.world, keep_last=self.keep_last, keep_best=0, sign=1)
        self.lock = self._claim()
        """Keeps other processes out of the folder."""
        self.prepared.finish_saves.extend([self.finish, self.lock.close])
        self.step = 0
        """The next step: that of the checkpoint, or 0 without one."""
        found = find_newest(checkpoints, self.world)
        if found is not None:
            path, manifest = found
            saved = dict(manifest.identity)
            identities = saved.pop(_DATASETS, [])
            restore(self._state, self.identity, path, replace(manifest, identity=saved))
            self.step = manifest.step
            self.datasets.restore(identities if isinstance(identities, list) else [identities], path)
        if self.world.rank == 0 and self.before_step is None:
            checkpoints.remove_leftovers(logger.warning)

    def _claim(self) -> ExitStack:
        """Wait for what an earlier object of this process saves to the folder, and keep other processes out.

        The earlier one, as of a cell of a notebook that ran before, hands its lock on. Collective.

        Returns:
            What lets others have the folder.

        Raises:
            RunDirError: if another process has the folder, or it cannot be written.
            StorageError: if the earlier object's save failed.
        """
        place, error = self.folder.resolve(), ""
        if earlier := _CLAIMED.get(place):
            earlier.finish()
        if self.before_step is not None:
            return ExitStack()
        lock = earlier.lock.pop_all() if earlier else ExitStack()
        if not earlier and self.world.rank == 0:
            try:
                with writing(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    lock_folder(self.folder, lock, "the folder of checkpoints", "another folder")
            except LanewiseError as caught:
                error = describe(caught)
        if error := self.world.broadcast_tree(error):
            raise RunDirError(error)
        _CLAIMED[place] = self
        lock.callback(_CLAIMED.pop, place, None)
        return lock

    def save(self, step: int) -> None:
        """Begin to save the state of the objects before `step`; they may change as soon as this returns.

        With `before_step` it does nothing, so that a loop may stay as it is.

        Raises:
            CheckpointError: if a value cannot be saved, or differs between ranks.
            WorldError: if a digest differs between ranks, as of an optimizer's state.
            StorageError: if the previous save failed.
        """
        if self.before_step is not None:
            return
        state = self._state.take()
        self._require_equal(state)
        identity = {**self.identity, _DATASETS: list(self.datasets.identities)}
        digests = gather_digests(state, self.world, step)
        manifest = Manifest(step=step, metric=None, identity=identity, files=(), digests=digests)
        self._saver.save(state, manifest)

    def _require_equal(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the state of an object differs between ranks. Collective.

        A checkpoint has one copy of it, which would be restored everywhere.
        """
        if self.world.world_size == 1:
            return
        left_out = state.get(LEFT_OUT, {})
        own = {key: _digest([state[key], left_out.get(key)], key) for key in self._compared}
        for rank, theirs in enumerate(self.world.all_gather_tree(own)):
            if differing := [key for key in self._compared if theirs[key] != own[key]]:
                raise CheckpointError(
                    f"the state of {differing[0]} differs between processes (ranks {self.world.rank} and "
                    f"{rank}), and a checkpoint holds one state for all. Let every process change a model "
                    "alike. Keep what belongs to a lane in a form that is the same on every process, or "
                    "gather it from all of them before saving."
                )

    def finish(self) -> None:
        """Wait until the last save is on disk."""
        self._saver.finish()


def _digest(state: Any, key: str) -> str:
    """Return a digest of the state of an object, in which sums stand for its tensors."""
    tensors = TensorTable()
    tree = json.dumps(encode(state, key, tensors), sort_keys=True)
    names = sorted(tensors.keys() - tensors.held)
    forms = [(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in names]
    return digest(tree, forms, [int(checksum(tensors[name])) for name in names])
