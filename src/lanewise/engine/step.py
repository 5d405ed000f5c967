"""One optimizer step over all lanes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from lanewise.checkpoint import grow_buffers
from lanewise.data import LaneBatch
from lanewise.engine.clock import StepClock
from lanewise.engine.passes import LanePasses
from lanewise.engine.scheduler import Plateau
from lanewise.precision import Precision
from lanewise.reduce import StepTotals
from lanewise.task import Task
from lanewise.world.accelerator import start_copy_to_host


@dataclass(frozen=True)
class Training:
    """What is trained, and by what."""

    task: Task
    model: nn.Module
    """The user's module, on the device of this process."""
    optimizer: Optimizer
    scheduler: LRScheduler | None
    """Stepped once in each optimizer step."""
    precision: Precision
    average: AveragedModel | None = None
    """The exponential moving average of the weights, which is what gets evaluated; None: the model itself."""
    plateau: Plateau | None = None
    """Stepped after each evaluation."""

    @property
    def evaluated_model(self) -> nn.Module:
        """The module to evaluate, and to keep if it is the best."""
        return self.model if self.average is None else self.average.module


@dataclass(frozen=True)
class StepReport:
    """What a step did; the same on every rank but for the times. Reading a number may wait for the device."""

    epoch: int
    step: int
    totals: StepTotals
    learning_rate: float
    """Of the first parameter group, as this step used it."""
    grad_norm: Callable[[], torch.Tensor]
    """Norm of the gradient before clipping."""
    skipped_steps: int
    """Steps so far that updated nothing since an fp16 gradient overflowed."""
    phase_seconds: Callable[[], dict[str, float]]
    """What the time went to."""


class TrainStep:
    """Runs steps: forward and backward of each lane, the reduction, clipping, the update.

    Args:
        training: the task, the module, the optimizer and the scheduler.
        passes: makes the gradient.
        clock: the one that `passes` has.
        max_grad_norm: clip the gradient to this norm.
        vote: asked in each step whether this process wants to save after it, and to stop.
    """

    def __init__(
        self,
        training: Training,
        passes: LanePasses,
        clock: StepClock,
        *,
        max_grad_norm: float | None = None,
        vote: Callable[[], tuple[bool, bool]] = lambda: (False, False),
    ) -> None:
        self._training = training
        self._passes = passes
        self._clock = clock
        self._max_grad_norm = max_grad_norm
        self._vote = vote
        self._what = f"the loss of {type(training.task).__name__}"

    def run(self, batches: Iterator[LaneBatch]) -> StepReport:
        """Take the next step's batches and update the model, alike on any number of processes.

        Where the global weight is 0, or an fp16 gradient overflowed, the weights stay.

        Collective: every rank must call this, with the batches of its own lanes.

        Raises:
            TaskError: if the task breaks its contract.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        task, model, passes = self._training.task, self._training.model, self._passes
        optimizer, scheduler = self._training.optimizer, self._training.scheduler
        for lanes in passes.groups(
            batches, vote=self._vote
        ):  # those that this process carries, one at a time or several
            losses = passes.run(lanes, task.forward, task.loss, self._training.precision.forward)
            passes.backward(losses, self._what)
        grad_norm = start_copy_to_host(passes.grad_norm)
        learning_rate = float(optimizer.param_groups[0]["lr"])
        if self._max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), self._max_grad_norm, passes.grad_norm)
        optimizer.step()  # does nothing where there is no gradient
        passes.set_update_state()  # under fsdp ranks update different parameters, and may draw unequally
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if self._training.average is not None and passes.allow_update:
            grow_buffers(self._training.average.module, dict(model.named_buffers()))
            self._training.average.update_parameters(model)
        self._clock.lap("optimizer")
        loss_scale = self._training.precision.loss_scale
        return StepReport(
            epoch=passes.turn.epoch,
            step=passes.turn.step,
            totals=passes.totals,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            skipped_steps=0 if loss_scale is None else loss_scale.skipped_steps,
            phase_seconds=self._clock.take(),
        )
