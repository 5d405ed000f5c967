"""Refuses what all processes should keep alike, once in a step, and do not."""

from collections.abc import Mapping
from typing import final

import torch
from torch import nn

from lanewise.engine.buffers.buffers import StepState
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.tensor_bytes import checksums, placed_checksum
from lanewise.processes.world.shards import is_sharded
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer


@final
class EqualState(Look):
    """Compares the processes after the first step, and finds lanes that write buffers of the whole step.

    Args:
        reducer: holds the model.
        world: the processes.
        step_state: the buffers that no lane may write.
    """

    def __init__(self, reducer: Reducer, world: World, step_state: StepState) -> None:
        self._model, self._world = reducer.model, world
        self._step_state = step_state
        self._first_step: int | None = None
        self._is_updated = False
        self._sums: dict[str, int] = {}

    def begin(self, turn: LaneTurn) -> None:
        """Collective."""
        self._first_step = turn.step if self._first_step is None else self._first_step
        self._is_updated = turn.step > self._first_step
        if self._is_updated:
            require_equal_state(self._model, self._world, turn.step - 1)
        self._sums = self._checksums()

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        self._require_unwritten(turn, "forward or the loss")

    def after_backward(self, turn: LaneTurn) -> None:
        self._require_unwritten(turn, "backward")

    def finish(self, totals: StepTotals) -> bool:
        return self._is_updated

    def _checksums(self) -> dict[str, int]:
        places = self._step_state[0] if self._step_state else ()
        tensors = {place.name: place.tensor for place in places if place.tensor is not None}
        return dict(zip(tensors, checksums(tensors.values()), strict=True))

    def _require_unwritten(self, turn: LaneTurn, where: str) -> None:
        for name, total in self._checksums().items():
            if total != self._sums.get(name):
                raise TaskError(
                    f"buffer {name} changed in the {where} of lane {turn.lane} in step {turn.step + 1}, and "
                    "step_state says that no lane writes it. Give what is new in Loss(..., gather=...) or "
                    "total=..., and write the buffer in after_update, once in a step (docs/losses.md); or "
                    "leave it out of step_state: then it becomes the mean over the lanes."
                )


def require_equal_state(model: nn.Module, world: World, step: int) -> None:
    """Compare buffers and frozen parameters between processes; parts of sharded ones are left out.

    Collective: every rank must call this.

    Args:
        model: the module of this process.
        world: the processes.
        step: the last step that was taken.

    Raises:
        TaskError: on every rank, if one differs; names it.
    """
    named = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not is_sharded(parameter):
            named[f"parameter {name}"] = parameter
    require_equal(named, world, step)


def require_equal(named: Mapping[str, torch.Tensor | None], world: World, step: int) -> None:
    """Compare tensors by name between processes; `require_equal_state` has the rest.

    Collective: every rank must call this.
    """
    if world.world_size == 1:
        return
    dense = {name: one for name, one in named.items() if one is not None and one.layout is torch.strided}
    own = dict(zip(dense, checksums(dense.values(), placed_checksum), strict=True))
    first, *others = world.all_gather_tree(own)
    for rank, theirs in enumerate(others, 1):
        if different := [name for name in [*first, *theirs] if first.get(name) != theirs.get(name)]:
            raise TaskError(
                f"{different[0]} differs between ranks 0 and {rank} after step {step + 1}: code that runs "
                "once in a step (before_update, after_update, a hook, your own loop) or a lane wrote it: "
                "every process must do the same. Compute it from what the lanes gather and add up, or from "
                "what all processes have; not from the rank, the time, or what this process's lanes alone "
                "have seen (docs/losses.md)."
            )
