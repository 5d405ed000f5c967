"""A loss of all samples of a step, as the step asks for it."""

from typing import Any, Protocol, final

import torch
from torch import nn

from lanewise.data import LaneBatch, digest
from lanewise.engine.reachable import walk
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.outputs import BatchOutputs
from lanewise.errors import TaskError
from lanewise.reduce import LaneWork

_MOST_LOOKS = 4
"""How many of a process's first losses by rows are looked at."""


class WholeLoss(Protocol):
    """A loss of all samples of a step."""

    what: str
    """Its name in an error message."""
    by_rows: bool
    """Whether it is computed for the samples of each lane in turn, against those of all lanes."""

    def lane(self, batch: LaneBatch) -> LaneWork:
        """Return a lane, whose forward is run."""
        ...

    def values(self, outputs: Any, data: Any) -> Any:
        """Return what the loss needs of a lane: tensors whose first dimension is its samples."""
        ...

    def compute(self, model: nn.Module, values: Any, rows: slice) -> object:
        """Return the loss, a mean over the samples or a `Loss`, of what the lanes returned.

        Args:
            model: the user's module.
            values: what `values` returned, of all lanes.
            rows: the samples whose loss it is: all of them, or where `by_rows` those of a lane.
        """
        ...


@final
class TaskLoss:
    """The `WholeLoss` of a task.

    Args:
        runner: of a task that has `batch_loss` or `row_loss`.
    """

    def __init__(self, runner: LaneRunner) -> None:
        self._runner = runner
        self.what = runner.what
        self.by_rows = runner.loss_method == "row_loss"
        self._num_looks = _MOST_LOOKS if self.by_rows else 0

    def lane(self, batch: LaneBatch) -> LaneWork:
        """See `WholeLoss`."""
        return self._runner.lane(batch)

    def values(self, outputs: Any, data: Any) -> Any:
        """See `WholeLoss`."""
        return outputs, self._runner.task.batch_loss_inputs(data)

    def parts(self, outputs: BatchOutputs, lanes: range) -> list[tuple[int, slice]]:
        """Return what this process computes of a batch: lanes and the samples whose loss it is."""
        if outputs.values is None or not outputs.rows:
            return []
        if not self.by_rows:
            return [(min(outputs.rows), slice(0, outputs.num_samples))]
        return [(lane, rows) for lane, rows in outputs.rows.items() if lane in lanes]

    def compute(self, model: nn.Module, values: Any, rows: slice) -> object:
        """See `WholeLoss`.

        Raises:
            TaskError: if a loss by rows keeps something: a process computes it for its own lanes alone.
        """
        outputs, inputs = values
        before = self._kept(model) if self._num_looks else {}
        returned = self._runner.batch_loss(model, outputs, inputs, rows)
        if self._num_looks:
            self._num_looks -= 1
            now = self._kept(model)
            if changed := [name for name, old in before.items() if now.get(name, old) != old]:
                raise TaskError(
                    f"{self.what} changes {changed[0]}. Each process computes the rows of its own "
                    "lanes alone, so that it would be another one on each. Keep it in batch_loss, which "
                    "every process computes of all samples."
                )
        return returned

    def _kept(self, model: nn.Module) -> dict[str, str]:
        """Return a digest of each tensor that the task keeps."""
        held = walk(model, {"task": self._runner.task})
        return {found.name: digest(found.value) for found in held if isinstance(found.value, torch.Tensor)}
