"""A loss of all samples of a step, as the step asks for it."""

from typing import Any, Protocol, final

from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.step.lane import LaneRunner, TaskLane
from lanewise.engine.step.outputs import BatchOutputs
from lanewise.reduce import LaneWork


class WholeLoss(Protocol):
    """A loss of all samples of a step."""

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
        self.by_rows = runner.loss_method == "row_loss"

    def lane(self, batch: LaneBatch) -> TaskLane:
        """See `WholeLoss`."""
        return self._runner.lane(batch)

    def values(self, outputs: Any, data: Any) -> Any:
        """See `WholeLoss`."""
        return outputs, self._runner.task.batch_loss_inputs(data)

    def parts(self, outputs: BatchOutputs, lanes: range) -> list[tuple[int, slice]]:
        """Return what this process computes of a batch: lanes and the samples whose loss it is."""
        if outputs.values is None:
            return []
        if not self.by_rows:
            return [(min(outputs.rows), slice(0, outputs.num_samples))]
        return [(lane, rows) for lane, rows in outputs.rows.items() if lane in lanes]

    def compute(self, model: nn.Module, values: Any, rows: slice) -> object:
        """See `WholeLoss`."""
        outputs, inputs = values
        return self._runner.batch_loss(model, outputs, inputs, rows)
