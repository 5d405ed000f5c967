"""One optimizer step over all lanes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from lanewise.checkpoint import grow_buffers
from lanewise.config.optimizer import needs_closure
from lanewise.data import LaneBatch
from lanewise.engine.clock import StepClock
from lanewise.engine.closure import step_with_closure
from lanewise.engine.gradient import LaneGradients, StepGradient
from lanewise.engine.lane import TaskLane
from lanewise.engine.log_interval import IntervalTotals, LogInterval
from lanewise.engine.optimizer_shards import OptimizerShards
from lanewise.engine.scheduler import Plateau
from lanewise.engine.step_batches import StepBatches
from lanewise.lanes import lane_seed, update_seed
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
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
    shards: OptimizerShards | None = None
    """Which process updates which parameter; None: each updates all of them."""

    @property
    def evaluated_model(self) -> nn.Module:
        """The module to evaluate, and to keep if it is the best."""
        return self.model if self.average is None else self.average.module


@dataclass(frozen=True)
class Line:
    """What a line of metrics says of the steps since the line before, and of the last of them.

    The same on every rank but for the times. Reading a number may wait for the device.
    """

    epoch: int
    step: int
    totals: IntervalTotals
    learning_rate: float
    """Of the first parameter group, as the last step used it."""
    grad_norm: Callable[[], torch.Tensor]
    """Norm of the last step's gradient before clipping."""
    gradient_norms: Callable[[], Mapping[str, float]]
    """Norm of each parameter's gradient in the last step, before clipping; empty unless they are logged."""
    skipped_steps: int | None
    """Steps so far that updated nothing since an fp16 gradient overflowed; None in other formats."""
    phase_seconds: Callable[[], dict[str, float]]
    """What the time went to that this process spent in these steps."""


class StepReport(NamedTuple):
    """What a step did."""

    step: int
    totals: StepTotals
    line: Line | None
    """None where the step is not logged."""


class TrainStep:
    """Takes steps: forward and backward of each lane, the reduction, clipping, the update.

    Args:
        training: the task, the module, the optimizer and the scheduler.
        gradients: makes the gradient.
        clock: the one that `gradients` has.
        interval: the steps since the last line of metrics; knows which steps are logged.
        seed: seed of the run.
        max_grad_norm: clip the gradient to this norm.
        logs_gradients: whether a line has the norm of each parameter's gradient.
    """

    def __init__(
        self,
        training: Training,
        gradients: LaneGradients,
        clock: StepClock,
        *,
        interval: LogInterval,
        seed: int,
        max_grad_norm: float | None = None,
        logs_gradients: bool = False,
    ) -> None:
        self.gradients = gradients
        self._training = training
        self._clock = clock
        self._interval = interval
        self._seed = seed
        self._max_grad_norm = max_grad_norm
        self._logs_gradients = logs_gradients
        self._needs_closure = needs_closure(type(training.optimizer))
        self._what = f"the loss of {type(training.task).__name__}"

    def run(self, batches: Iterator[LaneBatch]) -> StepReport:
        """Take the next step's batches and update the model, alike on any number of processes.

        Where the global weight is 0, or an fp16 gradient overflowed, the weights stay.

        Collective: every rank must call this, with the batches of its own lanes.

        Args:
            batches: consumed for one step.

        Raises:
            TaskError: if the task breaks its contract.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        training, optimizer = self._training, self._training.optimizer
        self._clock.skip()  # an evaluation may have come between
        if self._needs_closure:
            again = StepBatches(batches, copies=True)
            self._seed_update(next(iter(again)).turn.step)  # for what runs before the optimizer asks
            gradient = step_with_closure(optimizer, lambda: self._clip(self.compute_gradient(iter(again))))
        else:
            gradient = self._clip(self.compute_gradient(batches))
            optimizer.step()  # does nothing where there is no gradient
        learning_rate = float(optimizer.param_groups[0]["lr"])
        if training.scheduler is not None:
            self._seed_update(gradient.turn.step)  # processes with other parameters may have drawn unequally
            training.scheduler.step()
        for parameter in self.gradients.reducer.parameters:
            parameter.grad = None
        if training.average is not None and gradient.allows_update:
            grow_buffers(training.average.module, dict(training.model.named_buffers()))
            training.average.update_parameters(training.model)
        self._clock.lap("optimizer")
        step = gradient.turn.step
        self._interval.add(gradient.totals)
        line = self._line(gradient, learning_rate) if self._interval.ends_with(step) else None
        return StepReport(step, gradient.totals, line)

    def compute_gradient(self, batches: Iterator[LaneBatch]) -> StepGradient:
        """Leave the gradient of a step in every `param.grad`, and the random state of its update.

        Collective: every rank must call this, with the batches of its own lanes.

        Args:
            batches: consumed for one step.

        Raises:
            TaskError: if the task breaks its contract.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        for group in self.gradients.groups(batches):  # those that this process carries
            lanes = [self._lane(batch) for batch in group]
            losses = self.gradients.reducer.losses(lanes)  # forward and loss, under each lane's random state
            self.gradients.add(losses, self._what)  # backward; the last one overlaps the reduction
        is_logged = self._interval.ends_with(group[-1].turn.step)
        gradient = self.gradients.divide(  # one sum over all lanes, one divisor
            needs_norm=is_logged or self._max_grad_norm is not None,
            needs_norms=is_logged and self._logs_gradients,
        )
        self._seed_update(gradient.turn.step)
        return gradient

    def _lane(self, batch: LaneBatch) -> TaskLane:
        seed = lane_seed(self._seed, batch.turn.step, batch.turn.lane)
        return TaskLane(self._training.task, self._training.precision, batch, seed)

    def _seed_update(self, step: int) -> None:
        """Set the random state of what follows the lanes, alike on every process."""
        set_random_state(update_seed(self._seed, step))

    def _clip(self, gradient: StepGradient) -> StepGradient:
        """Clip what is in every `param.grad`, and pass on what is known of it."""
        if self._max_grad_norm is not None:
            assert gradient.norm is not None
            parameters = self._training.model.parameters()
            nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, gradient.norm)
        return gradient

    def _line(self, gradient: StepGradient, learning_rate: float) -> Line:
        """End the interval."""
        assert gradient.norm is not None
        loss_scale = self._training.precision.loss_scale
        return Line(
            epoch=gradient.turn.epoch,
            step=gradient.turn.step,
            totals=self._interval.take(),
            learning_rate=learning_rate,
            grad_norm=start_copy_to_host(gradient.norm),
            gradient_norms=self._named_norms(gradient.norms),
            skipped_steps=None if loss_scale is None else loss_scale.skipped_steps,
            phase_seconds=self._clock.take(),
        )

    def _named_norms(self, norms: torch.Tensor | None) -> Callable[[], Mapping[str, float]]:
        """Return what reads the norms of the parameters' gradients, by name."""
        if norms is None:
            return dict
        wait = start_copy_to_host(norms)
        named = self._training.model.named_parameters()
        names = [name for name, parameter in named if parameter.requires_grad]
        return lambda: dict(zip(names, wait().tolist(), strict=True))
