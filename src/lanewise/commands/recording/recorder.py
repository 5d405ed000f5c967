"""Takes steps of a run, and records what each read and computed, tensors as digests."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch.optim import Optimizer

from lanewise.commands.recording.comparison import Recording
from lanewise.data import LaneBatch, digest
from lanewise.engine.engine import Engine
from lanewise.engine.step.metrics import StepReport
from lanewise.processes.world.digests import digests_of
from lanewise.processes.world.shards import whole
from lanewise.processes.world.world import World


@final
class StepRecorder:
    """Takes the steps of an engine.

    Collective: every rank must make it, and call its methods alike.

    Args:
        engine: takes the steps.
        world: the processes.
    """

    def __init__(self, engine: Engine, world: World) -> None:
        self._engine, self._world = engine, world
        self._model, self._optimizer = engine.training.model, engine.training.optimizer
        self._weights = tensor_digests(self._model.named_parameters())
        self._at_update: dict[str, dict[str, str]] = {}
        """The parts that are recorded when the optimizer begins; empty before."""

    def take(self, step: int, batches: Iterator[LaneBatch]) -> tuple[Recording, StepReport]:
        """Take a step. Collective: every rank must call this.

        The parts are, by lane: `samples`, the dataset indices; `inputs`, the digest of what the forward got;
        `loss`, its sum, weight and metrics. By parameter: `gradients`, after clipping, and `weights` after
        the update; `outside`, those that something other than the optimizer changed since the last step.
        `buffers`; and `optimizer`, the options of its groups, as the update used them.

        Args:
            step: from 0.
            batches: those of this process; consumed for one step.
        """
        noted: dict[int, tuple[tuple[int, ...], str]] = {}
        self._at_update = {}
        handle = self._optimizer.register_step_pre_hook(self._before_update)
        try:
            report = self._engine.take_step(step, _noting(batches, noted))
        finally:
            handle.remove()
        lanes = sorted(lane for of_rank in self._world.all_gather_tree(noted) for lane in of_rank.items())
        self._weights = tensor_digests(self._model.named_parameters())
        recording = {
            "samples": {lane: indices for lane, (indices, _) in lanes},
            "inputs": {lane: inputs for lane, (_, inputs) in lanes},
            "loss": {lane.lane: lane.numbers for lane in report.totals.lanes},
            "outside": self._at_update.get("outside", {}),
            "gradients": self._at_update.get("gradients", {}),
            "weights": self._weights,
            "buffers": tensor_digests(self._model.named_buffers()),
            "optimizer": self._at_update.get("optimizer", {}),
        }
        return recording, report

    def _before_update(self, _optimizer: Optimizer, arguments: tuple[Any, ...], _: Any) -> Any:
        """Look at the gradient; where only a closure gives it, at the first one that the closure gives."""
        this, closure = (*arguments, None)[:2]
        if closure is None or any(weight.grad is not None for weight in self._model.parameters()):
            self._note()
            return None

        def note_once() -> Any:
            loss = closure()
            if not self._at_update:  # it asks for the first time
                self._note()
            return loss

        return (this, note_once), {}

    def _note(self) -> None:
        named = [*self._model.named_parameters()]
        now = tensor_digests(named)
        self._at_update = {
            "outside": {name: now[name] for name in self._weights if self._weights[name] != now[name]},
            "gradients": tensor_digests(
                (name, weight.grad) for name, weight in named if weight.grad is not None
            ),
            "optimizer": _options(self._optimizer),
        }


def tensor_digests(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the digest of each tensor, as those of a run's state are.

    Collective where tensors are sharded: every rank must call this.
    """
    found: dict[str, str] = {}
    for name, tensor in named:  # of those that are sharded a device has one whole at a time
        one = whole(tensor)
        found |= digests_of({name: one if one.layout is torch.strided else one.to_dense()})
    return found


def _noting(batches: Iterator[LaneBatch], noted: dict[int, Any]) -> Iterator[LaneBatch]:
    """Note the samples of each batch and the digest of its data, by lane, and yield it."""
    for batch in batches:
        if batch.indices:
            noted[batch.turn.lane] = batch.indices, digest(batch.own_data)
        yield batch


def _options(optimizer: Optimizer) -> dict[str, str]:
    """Return the options of each parameter group as JSON."""
    return {
        f"{key} of group {number}": json.dumps(
            value,
            default=lambda tensor: tensor.tolist() if isinstance(tensor, torch.Tensor) else repr(tensor),
        )
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
