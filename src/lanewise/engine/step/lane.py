"""Runs one lane: moves its micro-batch to the device, runs its forward and its loss, names it in errors."""

import errno
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from lanewise.data import LaneBatch
from lanewise.device.accelerator import new_stream, on_stream, start_copy_to_host
from lanewise.errors import LanewiseError, TaskError, note_place, text_of
from lanewise.lanes import LaneTurn, evaluation_seed, lane_seed
from lanewise.nested import map_leaves
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
from lanewise.task import Loss, Task


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

    def lane(self, batch: LaneBatch) -> "TaskLane":
        """Return a lane of a training step."""
        return TaskLane(self, batch, lane_seed(self.seed, batch.turn.step, batch.turn.lane))

    def evaluation_lane(self, batch: LaneBatch) -> "TaskLane":
        """Return a lane of an evaluation."""
        return TaskLane(self, batch, evaluation_seed(self.seed, batch.turn.step, batch.turn.lane))


@final
@dataclass(slots=True)
class TaskLane:
    """The work of one lane of a task: a `LaneWork` for reducers. Not frozen, like `LaneBatch`."""

    runner: LaneRunner
    batch: LaneBatch
    seed: int
    """Seed of the random numbers that forward and loss draw."""

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

    def forward(self, model: nn.Module, data: Any) -> Any:
        """See `LaneWork`."""
        set_random_state(self.seed)
        try:
            with self.runner.precision.forward():
                return self.runner.task.forward(model, data)
        except BaseException as error:
            note_lane(error, self.batch)
            raise

    def loss(self, outputs: Any, data: Any) -> Any:
        """See `LaneWork`."""
        try:
            with self.runner.precision.forward():
                return self.runner.task.loss(outputs, data)
        except BaseException as error:
            note_lane(error, self.batch)
            raise

    def check(self, returned: object) -> "LaneLoss":
        """Check what `loss` returned, and return it as a `LaneLoss`.

        Raises:
            TaskError: if it cannot be trained on.
        """
        return LaneLoss.of(self.batch, returned, f"the loss of {type(self.runner.task).__name__}")

    def run(self, model: nn.Module) -> "LaneLoss":
        """Run the forward and the loss, and check the loss."""
        return self.check(self.loss(self.forward(model, self.data), self.data))


@dataclass(slots=True)
class LaneLoss:
    """A loss of one lane that can be trained on: `factor * value` is the sum over its units.

    Not frozen, like `LaneBatch`.
    """

    value: torch.Tensor | None
    """Scalar, in training with a gradient; None where the weight is 0 and the lane contributes nothing."""
    factor: float
    """The weight if `value` is a mean, 1 if it is a sum. Kept apart from `value`, because the backward can
    start with it, which needs no further node in the graph."""
    weight: float
    is_sample_mean: bool
    """Whether the task returned a plain mean, whose weight is the number of samples."""

    @classmethod
    def of(cls, batch: LaneBatch, returned: object, what: str) -> "LaneLoss":
        """Make a `LaneLoss` of what the user's code returned.

        Args:
            batch: the batch of the lane.
            returned: what the user's code returned; ignored where the batch has no samples.
            what: the name of the loss in an error message.

        Raises:
            TaskError: if the loss is not a scalar, its weight is negative or not finite, or in training it
                has no gradient.
        """
        if not batch.num_samples:
            return cls(None, 1.0, 0.0, is_sample_mean=False)
        try:
            return cls._of_returned(returned, batch.num_samples, what)
        except BaseException as error:  # the weight may be the user's own object, whose conversion fails
            note_lane(error, batch)
            raise

    @classmethod
    def _of_returned(cls, returned: object, num_samples: int, what: str) -> "LaneLoss":
        value, weight, is_sample_mean = returned, float(num_samples), True
        if isinstance(returned, Loss):
            given = returned.weight
            weight = float(start_copy_to_host(given)() if isinstance(given, torch.Tensor) else given)
            value, is_sample_mean = returned.sum, False
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            if isinstance(value, torch.Tensor):
                of_sum = "a Loss whose sum is " if isinstance(returned, Loss) else ""
                got = f"{of_sum}a tensor of shape {tuple(value.shape)}"
            elif isinstance(returned, Loss):
                got = f"a Loss whose sum is a {type(value).__name__}, not a tensor"
            else:
                got = f"{returned!r:.60}"
            raise TaskError(
                f"{what} must be a scalar tensor or a Loss: got {got}. "
                "Give the mean over the micro-batch, or Loss(sum, weight) with the number of its units."
            )
        if not 0 <= weight < math.inf:
            raise TaskError(
                f"{what} has the weight {weight}: need a finite number that is not negative. "
                "The weight counts the units that were added up."
            )
        if not weight:
            return cls(None, 1.0, 0.0, is_sample_mean)
        if not value.requires_grad and torch.is_grad_enabled():
            raise TaskError(
                f"{what} has no gradient: nothing would be trained. "
                "Compute it from the model's outputs, without detach(), item() or torch.no_grad()."
            )
        if value.dim():
            value = value.reshape(())
        return cls(value, weight if is_sample_mean else 1.0, weight, is_sample_mean)

    @property
    def sum(self) -> torch.Tensor | None:
        """The sum of the loss over its units."""
        return None if self.value is None else self.value * self.factor

    def backward_factor(self, turn: LaneTurn, scale: float) -> torch.Tensor:
        """Return the scalar gradient of the loss with which the lane's backward starts.

        Args:
            turn: the lane's turn. If its lane is the only one in the step, the factor includes the division
                by the global weight.
            scale: the factor by which all losses, and so all gradients, are multiplied.
        """
        assert self.value is not None
        factor = self.factor * scale / (self.weight if turn.num_present_lanes == 1 else 1.0)
        return _scalar(factor, self.value.dtype, self.value.device)


@lru_cache(maxsize=64)
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=dtype, device=device)  # passed as a kernel's argument, without a copy


def note_lane(error: BaseException, batch: LaneBatch) -> None:
    """Add a note to an error of the user's code: the lane in which it arose.

    Raises:
        TaskError: in place of an error of torch whose remedy is known, or of a SystemExit.
    """
    if explained := _explain(error, batch):
        explained.add_note(batch.place)
        raise explained from error
    note_place(error, batch.place)


@contextmanager
def named_lane(batch: LaneBatch) -> Iterator[None]:
    """Call `note_lane` for errors in the block."""
    try:
        yield
    except BaseException as error:
        note_lane(error, batch)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, or the cause that it explains, says that there is no memory left."""
    if isinstance(error, LanewiseError) and error.__cause__ is not None:
        error = error.__cause__
    if type(error) in (RuntimeError, torch.AcceleratorError):
        return re.search(_NO_MEMORY, text_of(error)) is not None
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


_NO_MEMORY = r"\bDefaultCPUAllocator: |\b(error: |backend )out of memory"
"""Matches messages without an error type of their own: torch's for the CPU and for mps, and CUDA's own."""

_BATCH_OF_ONE = (
    "BatchNorm cannot normalise this lane's micro-batch: a partial last step may leave a lane with one "
    "sample. Set data.drop_last (drop_last of lanes.steps), or use another micro_batch_size."
)
_TOO_MANY_SHAPES = (
    "In exact, torch.compile makes a kernel for each shape that it meets, and there are more shapes than "
    "torch._dynamo.config.recompile_limit. Pad the batches to fewer shapes, or raise the limit."
)
_REMEDIES = {
    "builtins.ValueError": ("Expected more than 1 value per channel when training", _BATCH_OF_ONE),
    "torch._dynamo.exc.FailOnRecompileLimitHit": ("", _TOO_MANY_SHAPES),
}
"""For types of torch's errors: the beginning of the message, and an explanation with a remedy."""


def _explain(error: BaseException, batch: LaneBatch) -> TaskError | None:
    """Return a TaskError that explains an error of torch, with a remedy; None where no remedy is known."""
    if isinstance(error, LanewiseError):  # its message may quote torch's
        return None
    begin, remedy = _REMEDIES.get(f"{type(error).__module__}.{type(error).__qualname__}", ("", ""))
    if remedy and text_of(error).startswith(begin):
        return TaskError(f"{text_of(error)}. {remedy}")
    if not is_out_of_memory(error):
        return None
    said = f"{type(error).__name__}: {text_of(error)}".splitlines()[0].removesuffix(": ")
    return TaskError(
        f"out of memory with a micro-batch of {batch.num_samples} sample"
        f"{'s' * (batch.num_samples != 1)} ({_shapes_of(batch.data)}). "
        "Let a lane need less: memory.activation_checkpointing=auto, precision=bf16, or a smaller "
        "batch.micro_batch_size, which makes more lanes and so another model; or share the weights "
        f"out: distributed.reducer=fsdp. The error was {said}"
    )


def _shapes_of(data: Any) -> str:
    """Name the tensors of a batch with their shapes."""
    leaves, _ = tree_flatten_with_path(data)
    named = [f"{keystr(path)} {list(leaf.shape)}" for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return ", ".join(named).strip() or "no tensors"


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
