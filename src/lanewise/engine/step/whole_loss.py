"""A loss of all samples of a step, as the step asks for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from lanewise.data import LaneBatch, digest
from lanewise.engine.reachable import walk
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.outputs import BatchOutputs
from lanewise.errors import TaskError

_MOST_LOOKS = 4
"""How many of a process's first losses by rows are looked at."""


@final
@dataclass(frozen=True)
class WholeLoss:
    """A loss of all samples of a step."""

    what: str
    """Its name in an error message."""
    forward_of: Callable[[LaneBatch], Callable[[nn.Module, Any], Any]]
    """Returns the forward of a lane, under the lane's random state."""
    values: Callable[[Any, Any], Any]
    """Returns what the loss needs of a lane's outputs and data: tensors whose first dimension are samples."""
    compute: Callable[[nn.Module, Any, slice], object]
    """Returns the loss, a mean over the samples or a `Loss`, by the user's module, what `values` returned of
    all lanes, and the samples whose loss it is: all of them, or where `by_rows` those of a lane."""
    by_rows: bool = False
    """Whether it is computed for the samples of each lane in turn, against those of all lanes."""

    def parts(self, outputs: BatchOutputs, lanes: range) -> list[tuple[int, slice]]:
        """Return what this process computes of a batch: lanes and the samples whose loss it is."""
        if outputs.values is None or not outputs.rows:
            return []
        if not self.by_rows:
            return [(min(outputs.rows), slice(0, outputs.num_samples))]
        return [(lane, rows) for lane, rows in outputs.rows.items() if lane in lanes]


def task_loss(runner: LaneRunner) -> WholeLoss:
    """Return the loss of a task that has `batch_loss` or `row_loss`.

    It raises TaskError if a loss by rows keeps something: a process computes it for its own lanes alone.
    """
    by_rows = runner.loss_method == "row_loss"
    num_looks = _MOST_LOOKS if by_rows else 0

    def compute(model: nn.Module, values: Any, rows: slice) -> object:
        nonlocal num_looks
        outputs, inputs = values
        if not num_looks:
            return runner.batch_loss(model, outputs, inputs, rows)
        num_looks -= 1
        before = _kept(runner, model)
        returned = runner.batch_loss(model, outputs, inputs, rows)
        now = _kept(runner, model)
        if changed := [name for name, old in before.items() if now.get(name, old) != old]:
            raise TaskError(
                f"{runner.what} changes {changed[0]}. Each process computes the rows of its own "
                "lanes alone, so that it would be another one on each. Keep it in batch_loss, which "
                "every process computes of all samples."
            )
        return returned

    return WholeLoss(
        runner.what,
        lambda batch: runner.lane(batch).forward,
        lambda outputs, data: (outputs, runner.task.batch_loss_inputs(data)),
        compute,
        by_rows,
    )


def _kept(runner: LaneRunner, model: nn.Module) -> dict[str, str]:
    """Return a digest of each tensor that the task keeps."""
    held = walk(model, {"task": runner.task})
    return {found.name: digest(found.value) for found in held if isinstance(found.value, torch.Tensor)}
