"""One optimizer step over all lanes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lanewise.data import LaneBatch
from lanewise.engine.lane import LaneLoss, to_device
from lanewise.lanes import lane_seed
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
from lanewise.reduce import LaneBuffers, LaneTotals, Reducer, StepTotals, start_totals
from lanewise.task import Task
from lanewise.world.world import World


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


@dataclass(frozen=True)
class StepReport:
    """What a step did; the same on every rank but for the time."""

    epoch: int
    step: int
    totals: StepTotals
    learning_rate: float
    """Of the first parameter group, as this step used it."""
    grad_norm: float | None
    """Norm of the gradient before clipping; None without clipping."""
    duration_seconds: float


class TrainStep:
    """Runs steps: forward and backward of each lane, the reduction, clipping, the update.

    Args:
        training: the task, the module, the optimizer and the scheduler.
        reducer: sums the gradients of all lanes.
        world: the processes.
        num_lanes: lanes of the run.
        seed: seed of the run.
        max_grad_norm: clip the gradient to this norm.
    """

    def __init__(
        self,
        training: Training,
        reducer: Reducer,
        world: World,
        *,
        num_lanes: int,
        seed: int,
        max_grad_norm: float | None = None,
    ) -> None:
        self._training = training
        self._reducer = reducer
        self._buffers = LaneBuffers(training.model, world, num_lanes)
        self._world = world
        self._num_lanes = num_lanes
        self._seed = seed
        self._max_grad_norm = max_grad_norm
        self.is_sample_mean = False
        """Whether the last loss was a bare mean over samples, without a weight of its own."""

    def run(self, batches: Iterator[LaneBatch]) -> StepReport:
        """Take the next step's batches and update the model, alike on any number of processes.

        Where the loss of some lane is not finite, or the global weight is 0, nothing is updated.

        Collective: every rank must call this, with the batches of its own lanes.

        Raises:
            TaskError: if the task breaks its contract.
        """
        start = time.perf_counter()
        optimizer, scheduler = self._training.optimizer, self._training.scheduler
        own: list[LaneTotals] = []
        for batch in batches:  # the lanes that this process carries
            turn = batch.turn
            set_random_state(lane_seed(self._seed, turn.step, turn.lane))
            with self._buffers.lane(turn):
                loss_sum = self._reducer.forward(turn, partial(self._compute_loss, batch, own))
            if turn.is_last:  # all own weights are known: the exchange overlaps the last backward
                wait_for_totals = start_totals(self._world, self._num_lanes, turn.num_present_lanes, own)
            self._reducer.backward(turn, loss_sum)
            if turn.is_last:
                break
        totals = wait_for_totals()
        self._reducer.finish(totals.weight)
        grad_norm = self._clip()
        learning_rate = float(optimizer.param_groups[0]["lr"])
        if totals.allow_update:
            self._buffers.finish()
            optimizer.step()
        else:
            self._buffers.discard()
        if scheduler is not None and not totals.non_finite_lanes:
            scheduler.step()
        optimizer.zero_grad()
        return StepReport(
            turn.epoch, turn.step, totals, learning_rate, grad_norm, time.perf_counter() - start
        )

    def _compute_loss(self, batch: LaneBatch, own: list[LaneTotals]) -> torch.Tensor | None:
        """Return the sum of a lane's loss, None where it contributes nothing, and note its scalars."""
        if not batch.indices:
            return None
        try:
            task, data = self._training.task, to_device(batch.data, self._world.device)
            with self._training.precision.forward():
                outputs = task.forward(self._training.model, data)
                loss = LaneLoss.compute(task, outputs, data, len(batch.indices))
        except Exception as error:
            turn = batch.turn
            error.add_note(f"in step {turn.step}, lane {turn.lane}, samples {list(batch.indices)}")
            raise
        self.is_sample_mean = loss.is_sample_mean
        own.append(LaneTotals(batch.turn.lane, 0.0 if loss.sum is None else loss.sum.item(), loss.weight))
        return loss.sum

    def _clip(self) -> float | None:
        if self._max_grad_norm is None:
            return None
        parameters = (
            parameter for group in self._training.optimizer.param_groups for parameter in group["params"]
        )
        return float(nn.utils.clip_grad_norm_(parameters, self._max_grad_norm))
