"""Runs one lane: moves its micro-batch to the device, and runs its forward and its loss."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, final

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.device.accelerator import new_stream, on_stream
from lanewise.engine.step.lane_error import named_lane, note_lane
from lanewise.engine.step.lane_loss import LaneLoss, add_own_terms, check_each, terms_of
from lanewise.lanes import LaneTurn, evaluation_seed, lane_seed
from lanewise.nested import map_leaves
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
from lanewise.reduce import LaneWork
from lanewise.task import Task


@final
@dataclass(frozen=True)
class LaneRunner:
    """Runs the lanes of a task, each on any module and any number of times.

    The result of a lane depends only on the weights and buffers of the module, on the fields of this class,
    and on the lane's batch with its turn.
    """

    task: Task
    precision: Precision
    seed: int
    """Seed of the run."""

    @cached_property
    def loss_method(self) -> str:
        """Which of its methods is the task's loss: `loss`, or one that is of all lanes."""
        return self.task.loss_method()

    @property
    def has_several_losses(self) -> bool:
        """Whether the task's loss has several terms, each with a divisor of its own."""
        return type(self.task).loss_weights is not Task.loss_weights

    @property
    def what(self) -> str:
        """The name of the loss in an error message."""
        return f"the {self.loss_method} of {type(self.task).__name__}"

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any, rows: slice) -> Any:
        """Return the loss of some of the samples whose outputs are given, by the task's method for it."""
        with self.precision.forward():
            if self.loss_method == "row_loss":
                return self.task.row_loss(model, outputs, inputs, rows)
            return self.task.batch_loss(model, outputs, inputs)

    def lane(self, batch: LaneBatch) -> "TaskLane":
        """Return a lane of a training step."""
        return TaskLane(self, batch, lane_seed(self.seed, batch.turn.step, batch.turn.lane))

    def evaluation_lane(self, batch: LaneBatch) -> "TaskLane":
        """Return a lane of an evaluation."""
        return TaskLane(self, batch, evaluation_seed(self.seed, batch.turn.step, batch.turn.lane))


class LaneOfBatch(LaneWork, Protocol):
    """What a `LaneWork` tells of its batch."""

    __slots__ = ()
    batch: LaneBatch

    @property
    def turn(self) -> LaneTurn:
        """See `LaneWork`."""
        return self.batch.turn

    @property
    def data(self) -> Any:
        """See `LaneWork`."""
        return self.batch.data

    @property
    def has_samples(self) -> bool:
        """See `LaneWork`."""
        return self.batch.num_samples > 0


@final
@dataclass(slots=True)
class TaskLane(LaneOfBatch):
    """The work of one lane of a task: a `LaneWork` for reducers. Not frozen, like `LaneBatch`."""

    runner: LaneRunner
    batch: LaneBatch
    seed: int
    """Seed of the random numbers that forward and loss draw."""
    model: nn.Module | None = None
    """The module of the last forward."""

    def forward(self, model: nn.Module, data: Any) -> Any:
        """See `LaneWork`."""
        set_random_state(self.seed)
        self.model = model
        try:
            with self.runner.precision.forward():
                return self.runner.task.forward(model, data)
        except BaseException as error:
            note_lane(error, self.batch)
            raise

    def loss(self, outputs: Any, data: Any) -> Any:
        """See `LaneWork`. Where a loss is of all lanes, it is that of the lane as if it were alone."""
        try:
            if self.runner.loss_method != "loss":
                assert self.model is not None
                inputs, rows = self.runner.task.batch_loss_inputs(data), slice(0, self.batch.num_samples)
                return self.runner.batch_loss(self.model, outputs, inputs, rows)
            with self.runner.precision.forward():
                return self.runner.task.loss(outputs, data)
        except BaseException as error:
            note_lane(error, self.batch)
            raise

    def check(self, returned: object) -> LaneLoss:
        """Check what `loss` returned, and return it as a `LaneLoss`; several terms as if it were alone.

        Raises:
            TaskError: if it cannot be trained on.
        """
        if (terms := terms_of(returned)) and self.has_samples:
            with named_lane(self.batch):
                return add_own_terms(terms, self.batch.num_samples, self.runner.what)
        return LaneLoss.of(self.batch, returned, self.runner.what)

    def check_each(self, returned: object) -> list[LaneLoss]:
        """Check each term of what `loss` returned; one, where it is not several.

        Raises:
            TaskError: if it cannot be trained on.
        """
        with named_lane(self.batch):
            return check_each(returned, self.batch.num_samples, self.runner.what)

    def run(self, model: nn.Module) -> LaneLoss:
        """Run the forward and the loss, and check the loss."""
        return self.check(self.loss(self.forward(model, self.data), self.data))


def to_device(batches: Iterable[LaneBatch], device: torch.device) -> Iterator[LaneBatch]:
    """Yield batches whose tensors are on the device.

    A device with streams copies the tensors from pinned memory on a separate stream, while it computes what
    was enqueued before.
    """
    if device.type == "cpu":
        yield from batches
        return
    copying = new_stream(device)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf.to(device)
        with on_stream(copying):
            moved = leaf.to(device, non_blocking=copying is not None)
        if copying is not None:
            moved.record_stream(torch.accelerator.current_stream(device))
        return moved

    for batch in batches:
        data = map_leaves(move, batch.data)
        if copying is not None:
            torch.accelerator.current_stream(device).wait_stream(copying)
        yield replace(batch, data=data)
