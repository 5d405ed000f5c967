"""The lanes of a step: their batches on the device, and forward and loss of a task under each lane's seed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, final

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.precision import Precision
from lanewise.engine.step.lane_error import named_lane, note_lane
from lanewise.engine.step.terms import LaneLoss, check_each, check_whole
from lanewise.lanes import LaneTurn, evaluation_seed, lane_seed, update_seed
from lanewise.processes.device.accelerator import new_stream, on_stream
from lanewise.processes.device.nested import copied, map_leaves
from lanewise.processes.device.random_state import set_random_state
from lanewise.reduce import LaneWork
from lanewise.task import Task

T = TypeVar("T")


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
    def has_eval_loss(self) -> bool:
        """Whether the task has a loss of its own for evaluations, which may be none."""
        return type(self.task).eval_loss is not Task.eval_loss

    @cached_property
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
        return TaskLane(self, batch)

    def seed_update(self, step: int) -> None:
        """Set the random state for everything after the lanes of a step, the same on every process."""
        set_random_state(update_seed(self.seed, step))

    def evaluation_lane(self, batch: LaneBatch) -> "TaskLane":
        """Return a lane of an evaluation."""
        return TaskLane(self, batch, evaluation_seed, evaluates=True)


@final
@dataclass(slots=True)
class TaskLane(LaneWork):
    """The work of one lane of a task. Not frozen, like `LaneBatch`."""

    runner: LaneRunner
    batch: LaneBatch
    seed_of: Callable[[int, int, int], int] = lane_seed
    """Returns the seed under which forward and loss draw, by the run's seed, the step and the lane."""
    model: nn.Module | None = None
    """The module of the last forward."""
    evaluates: bool = False
    """Whether forward and loss are those of an evaluation."""

    def forward(self, model: nn.Module, data: Any) -> Any:
        turn, self.model = self.batch.turn, model
        set_random_state(self.seed_of(self.runner.seed, turn.step, turn.lane))
        try:
            with self.runner.precision.forward():
                task = self.runner.task
                return task.eval_forward(model, data) if self.evaluates else task.forward(model, data)
        except BaseException as error:
            note_lane(error, self.batch)
            raise

    def loss(self, outputs: Any, data: Any) -> Any:
        """Where a loss is of all lanes, it is that of the lane as if it were alone."""
        try:
            if self.evaluates and self.runner.has_eval_loss:
                with self.runner.precision.forward():
                    return self.runner.task.eval_loss(outputs, data)
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
        with named_lane(self.batch):
            return check_whole(returned, self.batch.num_samples, self.runner.what)

    def check_each(self, returned: object) -> list[LaneLoss]:
        """Check each term of what `loss` returned; one, where it is not several.

        Raises:
            TaskError: if it cannot be trained on.
        """
        with named_lane(self.batch):
            return check_each(returned, self.batch.num_samples, self.runner.what)

    def run(self, model: nn.Module) -> LaneLoss:
        """Run the forward and the loss, and check the loss."""
        return self.check(self.loss(self.forward(model, self.batch.data), self.batch.data))


@final
@dataclass(slots=True)
class DerivedLane(LaneWork):
    """A lane that gives something else than a loss, made of its outputs by `derive`."""

    batch: LaneBatch
    run: Callable[[nn.Module, Any], Any]
    """The forward, under the random state of the lane."""
    derive: Callable[[Any, Any], Any]
    """Gets the outputs and the data."""
    model: nn.Module | None = None
    """The module of the last forward."""

    def forward(self, model: nn.Module, data: Any) -> Any:
        self.model = model
        with named_lane(self.batch):
            return self.run(model, data)

    def loss(self, outputs: Any, data: Any) -> Any:
        with named_lane(self.batch):
            return self.derive(outputs, data)


@final
class StepBatches:
    """Reads the batches of a step once, and yields them each time it is iterated over.

    Args:
        batches: the batches of this process; consumed for one step.
    """

    def __init__(self, batches: Iterator[LaneBatch]) -> None:
        self._batches = batches
        self._kept: list[LaneBatch] = []

    @property
    def turn(self) -> LaneTurn:
        """The first turn of this process in the step."""
        return next(iter(self)).turn

    def __iter__(self) -> Iterator[LaneBatch]:
        yield from self._kept
        while not self._kept or not self._kept[-1].turn.is_last:
            batch = next(self._batches)
            self._kept.append(batch)
            yield batch

    def copies(self) -> Iterator[LaneBatch]:
        """Yield copies, for a forward that may change its batch and is not the last one."""
        for batch in self:
            yield replace(batch, data=copied(batch.data))


class LaneLosses(Protocol):
    """Knows the losses of a step's lanes: each has its own, or its share of one of several lanes."""

    lane: Callable[[LaneBatch], LaneWork]
    """Returns the lane of a batch."""

    def begin(self, batches: Iterator[LaneBatch]) -> Iterable[LaneBatch]:
        """Begin with the batches of this process in a step, and return them, in order.

        What needs all lanes before the first backward happens here: a first pass over them. Collective.
        """
        return batches

    def of(self, lanes: Sequence[Any], returned: Sequence[Any]) -> Iterable[object]:
        """Return what the backward of each lane of a round begins with, by what its forward and loss gave."""
        return returned


@final
@dataclass(frozen=True)
class OwnLosses(LaneLosses):
    """Each lane has its own."""

    lane: Callable[[LaneBatch], LaneWork]


def to_device(batches: Iterable[LaneBatch], device: torch.device) -> Iterator[LaneBatch]:
    """Yield batches whose tensors are on the device.

    A device with streams copies the tensors from pinned memory on a separate stream, while it computes what
    was enqueued before.
    """
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
        with named_lane(batch):
            data = map_leaves(move, batch.data)
        if copying is not None:
            torch.accelerator.current_stream(device).wait_stream(copying)
        yield replace(batch, data=data)
