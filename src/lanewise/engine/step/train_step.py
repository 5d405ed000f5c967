"""One optimizer step over all lanes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from lanewise.checkpoint.model_file import grow_buffers
from lanewise.data import LaneBatch
from lanewise.engine.step.gradient import IsLogged, LaneGradients, StepGradient
from lanewise.engine.step.lane import LaneRunner
from lanewise.engine.step.logged_metrics import IntervalReport, StepMetrics
from lanewise.engine.step.message import StepTotals
from lanewise.engine.step.update import choose_update
from lanewise.lanes import update_seed
from lanewise.random_state import set_random_state
from lanewise.watch.heartbeat import CALLBACK, OPTIMIZER, heartbeat

RunLanes: TypeAlias = Callable[[Iterator[LaneBatch], IsLogged], None]
"""Runs the forwards and backwards of a step, and is told which steps are logged."""


@dataclass(frozen=True)
class Training:
    """The model and what trains it."""

    runner: LaneRunner
    model: nn.Module
    """The user's module, on the device of this process."""
    optimizer: Optimizer
    scheduler: LRScheduler | None
    """Stepped once in each optimizer step."""
    average: AveragedModel | None = None
    """The exponential moving average of the weights, which is evaluated; None: the model is evaluated."""
    closure: bool = False
    """`optimizer.closure`: whether a step gets a closure besides the gradient."""

    @property
    def evaluated_model(self) -> nn.Module:
        """The module to evaluate, and to keep if it is the best."""
        return self.model if self.average is None else self.average.module


class StepReport(NamedTuple):
    """The outcome of a step."""

    step: int
    totals: StepTotals
    interval: IntervalReport | None
    """The numbers of a line of metrics; None where the step is not logged."""


@dataclass
class TrainStep:
    """Takes steps: forward and backward of each lane, the reduction, clipping, the update."""

    training: Training
    """The lane runner, the module, the optimizer and the scheduler."""
    gradients: LaneGradients
    """Computes the gradient."""
    metrics: StepMetrics
    """Decides which steps are logged, and makes their reports."""
    run_together: RunLanes | None
    """Runs the lanes of a task whose loss needs all lanes of a step; None: each lane has its own."""
    max_grad_norm: float | None
    """The norm to which the gradient is clipped; None: it is not clipped."""

    def __post_init__(self) -> None:
        self._what = self.training.runner.what
        optimizer, closure = self.training.optimizer, self.training.closure
        self._update = choose_update(optimizer, self.compute_gradient, self._seed_update, closure=closure)

    def run(self, batches: Iterator[LaneBatch]) -> StepReport:
        """Take one step: consume its batches and update the model.

        The update is the same on any number of processes. Where the global weight is 0, or an fp16 gradient
        overflowed, the weights do not change.

        Collective: every rank must call this, with the batches of its own lanes.

        Args:
            batches: consumed for one step.

        Raises:
            TaskError: if the task breaks its contract.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        training, clock = self.training, self.metrics.clock
        clock.skip()  # time since the last step, perhaps of an evaluation, belongs to no phase
        gradient = self._update(batches)
        learning_rate = float(training.optimizer.param_groups[0]["lr"])
        if training.scheduler is not None:
            # Processes that updated different parameters may have drawn different random numbers.
            self._seed_update(gradient.turn.step)
            training.scheduler.step()
        for parameter in self.gradients.reducer.parameters:
            parameter.grad = None
        if training.average is not None and gradient.allows_update:
            grow_buffers(training.average.module, dict(training.model.named_buffers()))
            training.average.update_parameters(training.model)
        clock.lap(OPTIMIZER, begins=CALLBACK)
        heartbeat.has_trained = True
        return StepReport(gradient.turn.step, gradient.totals, self.metrics.report(gradient, learning_rate))

    def compute_gradient(self, batches: Iterator[LaneBatch]) -> StepGradient:
        """Write the clipped gradient of a step to every `param.grad`, and seed the step's update.

        Collective: every rank must call this, with the batches of its own lanes.

        Args:
            batches: consumed for one step.

        Raises:
            TaskError: if the task breaks its contract.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        is_logged = self.metrics.interval.ends_with
        if self.run_together is not None:  # the loss of a lane depends on the other lanes
            self.run_together(batches, is_logged)
        else:
            for in_round in self.gradients.rounds(batches, is_logged):  # micro-batches
                losses = self.gradients.reducer.losses(list(map(self.training.runner.lane, in_round)))
                self.gradients.backward(losses, self._what)  # backward; the last one overlaps the reduction
        clips = self.max_grad_norm is not None
        gradient = self.gradients.finish(needs_norm=clips)  # one division by the global weight
        if self.max_grad_norm is not None:
            assert gradient.norm is not None
            nn.utils.clip_grads_with_norm_(
                self.training.model.parameters(), self.max_grad_norm, gradient.norm
            )
        self._seed_update(gradient.turn.step)
        return gradient

    def _seed_update(self, step: int) -> None:
        """Set the random state for everything after the lanes, the same on every process."""
        set_random_state(update_seed(self.training.runner.seed, step))
