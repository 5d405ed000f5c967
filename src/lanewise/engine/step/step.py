"""One optimizer step over all lanes, in the order in which things happen.

begin     forget gradients that are left
backward  of a lane whose forward and loss `LaneLosses` ran; before this process's last, send the message
finish    receive the totals of all lanes; divide by their weight; merge buffers, whose values travel now if a
          lane changed any, or drop them and the gradients
then      Task.before_update, clip, optimizer, scheduler, forget the gradients, average, report
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import torch

from lanewise.data import LaneBatch
from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.step.average import update_average
from lanewise.engine.step.guard.attributes import Attributes
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.lane_error import named_lane, note_lane
from lanewise.engine.step.lanes import DerivedLane, LaneLosses, LaneRunner, StepBatches, TaskLane, to_device
from lanewise.engine.step.message import StepMessage
from lanewise.engine.step.metrics import Gradient, LogInterval, StepMetrics, StepReport
from lanewise.engine.step.phases import Phases
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.update import Training, explain
from lanewise.engine.step.wire import Spread, Votes
from lanewise.lanes import LaneTurn
from lanewise.processes.watch.heartbeat import (
    BACKWARD,
    CALLBACK,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    heartbeat,
)
from lanewise.reduce import LaneWork, Reducer, forget_gradients

T = TypeVar("T")


@final
@dataclass
class Pass:
    """A pass over the lanes of a step. It leaves the mean over the global batch in `param.grad`, or nothing.

    Collective: every rank must call `begin`, then `backward` for each of `lanes`, and `finish`, which raises
    NonFiniteLossError if the loss of some lane is NaN or infinite.
    """

    reducer: Reducer
    """Has the model, runs the lanes on it, and sums their gradients over all processes in `finish`."""
    spread: Spread
    buffers: LaneBuffers
    """`changes` is the largest change by a lane here, of each pack of them; values travel in `merge`."""
    phases: Phases
    """Measures how long each takes, and tells the heartbeat."""
    message: StepMessage
    """Carries each lane's loss and weight to all processes; `receive` adds them up. Its `scale` is the factor
    of the fp16 loss scale; 1 in other formats."""
    rules: Sequence[Callable[[LaneTurn], None]]
    """Each is called with this process's first turn of a step, and may raise TaskError; see `build_pass`."""
    looks: list[Look]
    """What is still looked at; empty after the first steps."""
    attributes: Attributes
    """The one of them that begins anew after each checkpoint."""
    log: LogInterval | None
    """Which steps are logged, by their number, or as the last one of a stream; None: none is."""
    vote: Callable[[], Votes]
    """What this process wants after a step: to save, to stop or to end. One process that does is enough."""

    def begin(self, step: int) -> None:
        """Begin the pass."""
        self.phases.begin(DATA, step)
        forget_gradients(self.reducer.parameters)
        self.message.begin()

    def lanes(self, batches: Iterable[LaneBatch], lane_of: Callable[[LaneBatch], T]) -> Iterator[T]:
        """Yield the lanes of this process. Collective: every rank must iterate to the end.

        Args:
            batches: consumed for one step.
            lane_of: makes a lane of its batch.

        Raises:
            TaskError: if the step breaks a rule.
        """
        is_first = True
        if self.spread.world.device.type != "cpu":
            batches = to_device(batches, self.spread.world.device)
        for batch in self.reducer.pad(iter(batches)):
            turn = batch.turn
            self.phases.begin(FORWARD, turn.step, turn.lane)
            if is_first:
                for rule in self.rules:
                    rule(turn)
                for look in self.looks:
                    with named_lane(batch):
                        look.begin(turn)
                is_first = False
            if self.buffers.are_any:
                self.buffers.begin()
            lane = lane_of(batch)
            for look in self.looks:
                look.before_forward(turn, lane)
            yield lane
            del batch, lane  # before the next one is read
            if turn.is_last:  # of this process, with those that `pad` adds
                return
            self.phases.begin(DATA, turn.step)

    def forwards(
        self, kept: StepBatches, lane_of: Callable[[LaneBatch], DerivedLane]
    ) -> Iterator[tuple[DerivedLane, Any]]:
        """Yield each lane with what it returned, before a second pass in which it gets a backward.

        Collective: every rank must iterate to the end.
        """
        for lane, returned in self.reducer.forwards(self.lanes(kept.copies(), lane_of)):
            for look in self.looks:
                look.after_forward(lane.batch.turn, None)
            self.buffers.discard()
            yield lane, returned

    def backward(self, batch: LaneBatch, loss: object, what: str) -> None:
        """Add a lane whose forward and loss have run; `loss` is what the user's code gave, or a `LaneLoss`.

        Raises TaskError, in which the loss is called `what`, if it cannot be trained on.
        """
        turn = batch.turn
        self.phases.begin(BACKWARD, turn.step, turn.lane)
        try:
            if not isinstance(loss, LaneLoss):
                loss = LaneLoss.of(loss, batch.num_samples, what)
            if self.buffers.are_any:
                self.buffers.end(turn, batch.num_samples)
            for look in self.looks:
                look.after_forward(turn, loss)
            self.message.add(batch, loss)  # the run's first lane fixes the unit of the fp16 loss scale
            # During its last backward the message travels, and so do gradients (fsdp: in each).
            if turn.is_last:
                self._last_turn = turn
                self._is_due = self.log is not None and self.log.is_due(turn.step)
                is_compared = self._is_due and self.spread.world.world_size > 1  # to find the slowest rank
                seconds = (
                    [self.phases.computed_seconds()] if is_compared else ()
                )  # of a step before, on average
                votes, changes = self.vote(), self.buffers.changes
                self.message.send(batch, votes=votes, buffer_changes=changes, computed_seconds=seconds)
            self.reducer.backward(turn, *loss.root(turn, self.message.scale))
            for look in self.looks:
                look.after_backward(turn)
        except BaseException as error:
            note_lane(error, batch)
            raise

    def finish(self, *, needs_norm: bool = True) -> Gradient:
        """Receive, divide and merge the buffers; where nothing may change, drop buffers and gradients."""
        turn, norm, norms, loss_scale = self._last_turn, None, None, self.message.loss_scale
        if self.spread.world.world_size > 1:
            self.phases.begin(COMMUNICATION, turn.step)
        totals = self.message.receive()
        is_logged = self._is_due
        if totals.to_source and self.log is not None:  # `receive` gave it to the stream, which knows its end
            is_logged |= self.log.is_over()
        # In a step of a single lane `LaneLoss.root` has divided by the weight, which spares a division here.
        self.reducer.finish(self.message.scale * (1.0 if len(turn.present) == 1 else totals.weight))
        if needs_norm or is_logged or loss_scale is not None:
            norms = self.reducer.gradient_norms()
            norm = torch.linalg.vector_norm(norms)
        # `fits` also adapts the scale.
        allows_update = totals.is_trainable and (loss_scale is None or loss_scale.fits(norm))
        if not allows_update:
            self.buffers.discard()
            forget_gradients(self.reducer.parameters)
        elif self.buffers.are_any:
            self.buffers.merge(totals.buffer_changes)
        self.phases.begin(OPTIMIZER, turn.step)
        if self.looks:
            self.looks = [look for look in self.looks if not look.finish(totals)]
        if not totals.is_trainable:
            self.message.explain_no_update(totals, turn)  # raises or warns; collective, so after the others
        return Gradient(turn, totals, norm, norms, allows_update, is_logged)

    def watched(self, run: Callable[[], T], what: str, *, until_saved: bool = False) -> T:
        """Run what is run once in a step; see `Attributes.watched`."""
        if not self.attributes.num_watched:
            return run()
        return self.attributes.watched(run, what, until_saved=until_saved)

    def look_again(self) -> None:
        """Look at what lanes keep in the next steps too."""
        self.attributes.restart()
        self.looks = [*(look for look in self.looks if look is not self.attributes), self.attributes]


@final
@dataclass
class OwnLosses(LaneLosses):
    """Runs each lane's forward and its own loss."""

    pass_: Pass
    runner: LaneRunner

    def of(self, batches: Iterator[LaneBatch]) -> Iterator[tuple[LaneWork, object]]:
        return self.pass_.reducer.losses(self.pass_.lanes(batches, partial(TaskLane, self.runner)))


@final
@dataclass
class TrainStep:
    """Takes steps. Where the global weight is 0, or an fp16 gradient overflowed, no parameter changes.

    The scheduler steps all the same, and the losses of the lanes count.
    """

    pass_: Pass
    losses: LaneLosses
    """Runs forward and loss of each lane when it is asked for it; of a round of replicas, or for a loss of
    all samples, those of several lanes before it yields the first."""
    runner: LaneRunner
    """Has the seed of the update, and the name of the loss."""
    training: Training
    """The optimizer, and all that changes weights after it."""
    metrics: StepMetrics
    """Adds the steps up to those that are logged."""

    def run(self, step: int, batches: Iterator[LaneBatch]) -> StepReport:
        """Take a step. Collective: every rank must call this, with the batches of its own lanes."""
        gradient = self.gradient(step, batches)
        try:
            self.training.optimizer.step()  # does nothing where there is no gradient
        except Exception as error:
            explain(error, self.training.optimizer)
            raise
        return self.end(gradient)

    def gradient(self, step: int, batches: Iterator[LaneBatch]) -> Gradient:
        """Write the clipped gradient of a step to every `param.grad`, and seed its update. Collective."""
        training = self.training
        self.pass_.begin(step)
        for lane, loss in self.losses.of(batches):  # runs forward and loss of each lane
            self.pass_.backward(lane.batch, loss, self.runner.what)
            del lane, loss  # before the next batch is read
        gradient = self.pass_.finish(needs_norm=training.max_grad_norm is not None)
        for change in training.gradient_changes:
            change(gradient, self.pass_.watched)
        self.runner.seed_update(step)
        return gradient

    def end(self, gradient: Gradient) -> StepReport:
        """Step the scheduler and the average, and report the step."""
        training, step = self.training, gradient.turn.step
        learning_rate = float(training.optimizer.param_groups[0]["lr"])
        if training.scheduler is not None and (step + 1) % training.steps_per_value == 0:
            self.runner.seed_update(step)  # anew: with shards, processes updated different parameters
            training.scheduler.step()
        forget_gradients(self.pass_.reducer.parameters)
        if training.after_update is not None and gradient.allows_update:
            self.pass_.watched(partial(training.after_update, gradient), "after_update")
        if training.average is not None and gradient.allows_update:
            update_average(training.average, training.model)
        self.pass_.phases.begin(CALLBACK, step)
        heartbeat.has_trained = True
        self.metrics.interval.add(step, gradient.totals)
        report = self.metrics.report(gradient, learning_rate) if gradient.is_logged else None
        return StepReport(step, gradient.totals, report)
