"""A loss of all samples of a step, as the step asks for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.step.lanes import DerivedLane, LaneRunner
from lanewise.engine.step.outputs import BatchOutputs, map_tensors


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

    def lane(self, batch: LaneBatch, *, keeps_graph: bool = True) -> DerivedLane:
        """Return a lane that gives what the loss needs of it."""

        def values(outputs: Any, data: Any) -> Any:
            needed = self.values(outputs, data)
            return needed if keeps_graph else map_tensors(without_graph, needed)

        return DerivedLane(batch, self.forward_of(batch), values)

    def parts(self, outputs: BatchOutputs, lanes: range) -> list[tuple[int, slice]]:
        """Return what this process computes of a batch: lanes and the samples whose loss it is."""
        if outputs.values is None or not outputs.rows:
            return []
        if not self.by_rows:
            return [(min(outputs.rows), slice(0, outputs.num_samples))]
        return [(lane, rows) for lane, rows in outputs.rows.items() if lane in lanes]


def task_loss(runner: LaneRunner) -> WholeLoss:
    """Return the loss of a task that has `batch_loss` or `row_loss`."""
    return WholeLoss(
        runner.what,
        lambda batch: runner.lane(batch).forward,
        lambda outputs, data: (outputs, runner.task.batch_loss_inputs(data)),
        lambda model, values, rows: runner.batch_loss(model, values[0], values[1], rows),
        by_rows=runner.loss_method == "row_loss",
    )


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph, which still tells whether it had one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
