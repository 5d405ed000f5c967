"""Runs one lane: its micro-batch goes to the device, then its forward and its loss; errors name the lane."""

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
    """Runs the lanes of a task, each on whichever module it is given, and as often as wanted.

    What comes out of a lane depends on the weights and buffers of the module, on what stands here, and on the
    lane's batch with its turn; and on nothing else.
    """

    task: Task
    precision: Precision
    seed: int
    """Of the run."""

    def lane(self, batch: LaneBatch) -> "TaskLane":
        """Return a lane of a training step."""
        return TaskLane(self, batch, lane_seed(self.seed, batch.turn.step, batch.turn.lane))

    def evaluation_lane(self, batch: LaneBatch) -> "TaskLane":
        """Return a lane of an evaluation."""
        return TaskLane(self, batch, evaluation_seed(self.seed, batch.turn.step, batch.turn.lane))


@final
@dataclass(slots=True)
class TaskLane:
    """What a task computes for one lane; the `LaneWork` of reducers. Not frozen, as `LaneBatch`."""

    runner: LaneRunner
    batch: LaneBatch
    seed: int
    """Of the random numbers that forward and loss draw."""

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
        """Return what `loss` gave as a loss that can be trained on.

        Raises:
            TaskError: if it cannot.
        """
        return LaneLoss.of(self.batch, returned, f"the loss of {type(self.runner.task).__name__}")

    def run(self, model: nn.Module) -> "LaneLoss":
        """Run both halves, forward and loss, and check what they give."""
        return self.check(self.loss(self.forward(model, self.data), self.data))


@dataclass(slots=True)
class LaneLoss:
    """A loss of one lane that can be trained on: `factor * value` is the sum over its units.

    Not frozen, as `LaneBatch`.
    """

    value: torch.Tensor | None
    """Scalar, in training with a gradient; None where the weight is 0 and the lane contributes nothing."""
    factor: float
    """The weight of a mean, and 1 of a sum. Kept apart, as a backward multiplies by it without a node."""
    weight: float
    is_sample_mean: bool
    """Whether the task returned a bare mean, which weighs as many units as there are samples."""

    @classmethod
    def of(cls, batch: LaneBatch, returned: object, what: str) -> "LaneLoss":
        """Make one of what the user's code returned, if that can be trained on.

        Args:
            batch: the lane's.
            returned: what the user's code made of it; disregarded where it has no samples.
            what: how to call it in an error.

        Raises:
            TaskError: if it is not a scalar with a weight of 0 or more, and in training a gradient.
        """
        if not batch.num_samples:
            return cls(None, 1.0, 0.0, is_sample_mean=False)
        try:
            return cls._of_returned(returned, batch.num_samples, what)
        except BaseException as error:  # a weight may be an object of the user's
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
                got = f"a tensor of shape {tuple(value.shape)}"
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
        """The loss added up over its units."""
        return None if self.value is None else self.value * self.factor

    def backward_factor(self, turn: LaneTurn, scale: float) -> torch.Tensor:
        """Return the scalar that the lane's backward begins with.

        Args:
            turn: a lane that is alone in its step has the division by the global weight in it.
            scale: what the sums of losses, and so of gradients, are multiplied by.
        """
        assert self.value is not None
        factor = self.factor * scale / (self.weight if turn.num_present_lanes == 1 else 1.0)
        return _scalar(factor, self.value.dtype, self.value.device)


@lru_cache(maxsize=64)
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=dtype, device=device)  # a kernel's argument: no copy to wait for


def note_lane(error: BaseException, batch: LaneBatch) -> None:
    """Add to an error of the user's code in which lane it arose, and the remedy if one is known.

    Raises:
        TaskError: instead of an error of torch whose remedy is known, and of a SystemExit.
    """
    if explained := _explain(error, batch):
        explained.add_note(batch.place)
        raise explained from error
    note_place(error, batch.place)


@contextmanager
def named_lane(batch: LaneBatch) -> Iterator[None]:
    """Do `note_lane` for errors of a block."""
    try:
        yield
    except BaseException as error:
        note_lane(error, batch)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that there is no memory left, or explains one that does."""
    if isinstance(error, LanewiseError) and error.__cause__ is not None:
        error = error.__cause__
    if type(error) in (RuntimeError, torch.AcceleratorError):
        return re.search(_NO_MEMORY, text_of(error)) is not None
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


_NO_MEMORY = r"\bDefaultCPUAllocator: |\b(error: |backend )out of memory"
"""By what torch says of the CPU, where it has no type of its own, of CUDA's own errors, and of mps."""

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
"""By the type of torch's error: how it begins; what is wrong, in terms of a run, and what to change."""


def _explain(error: BaseException, batch: LaneBatch) -> TaskError | None:
    """Return an error of torch in terms of a run, with the remedy; None where none is known."""
    if isinstance(error, LanewiseError):  # it may quote what torch says
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

    A device with streams copies them on one of its own, from pinned memory, while it computes what was
    enqueued before.
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
