"""One optimizer step over all lanes, in the order in which things happen.

A lane is a virtual data-parallel worker with a micro-batch of its own; each process carries some of them, and
has a replica of the model on each of its devices, mostly one. A turn is a lane in a step. In a step come:

begin     forget gradients that are left
rounds    of lanes that run at once, one for each replica: start, where buffers are put back to those of the
          step's start; then their forwards and losses
backward  of each lane; replicas run theirs at once, when that of the round's last lane is due. Before its
          last backward a process sends its message, which travels meanwhile. Gradients are summed, not
          averaged, over the processes during that backward (fsdp: during each)
finish    receive the messages of all, for which the process waits for the others and for its device; divide
          by the weight of all lanes; merge the buffers of the lanes (`engine/buffers`), whose values travel
          now if a lane changed any, or drop them and the gradients
then      Task.before_update*, clip*, optimizer*, scheduler, forget the gradients, Task.after_update*,
          average*, report. What has an asterisk changes nothing in a step that must not update

What a lane draws follows from seed, step and lane (`TaskLane`), what the optimizer, the scheduler,
before_update and after_update draw from seed and step: it is the same on whatever process. A lane without
samples has no turn. A process without any has one turn, in which it runs nothing, and communicates as the
others do; under fsdp all run equally many forwards and backwards, and discard what comes of the surplus. An
error of one process leaves its step, and is told the others through the store, where the watch of each finds
it and ends its process. Whether a step updates anything depends on its losses and weights; only fp16 looks at
the gradient, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch

from lanewise.data import LaneBatch
from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.step.average import update_average
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.judgement import Judgement
from lanewise.engine.step.lane_error import named_lane, note_lane
from lanewise.engine.step.lanes import DerivedLane, LaneLosses, LaneRunner, StepBatches, to_device
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
from lanewise.reduce import Reducer, forget_gradients

T = TypeVar("T")


@final
@dataclass
class Pass:
    """Runs the pass over the lanes of a step. It leaves the mean over the global batch in `grad`, or None.

    Collective: every rank must call `begin`, for each of `rounds` `start`, `Reducer.run` and then `backward`
    of each lane, which is what `run` does, and `finish`. That raises NonFiniteLossError if the loss of some
    lane is NaN or infinite. `forwards` is a pass without backward, before it.
    """

    reducer: Reducer
    """Has the model, runs the lanes on it, and sums their gradients over all processes."""
    spread: Spread
    """The processes (`world`), which lanes each carries (`placement`), and the grade: `close` or `exact`."""
    buffers: LaneBuffers
    """`changes` is the largest change by a lane here, of each pack of them; values travel in `merge`."""
    phases: Phases
    """Measures how long each takes, and tells the heartbeat."""
    message: StepMessage
    """Carries each lane's loss and weight to all processes, with votes and the like; `receive` adds them up.
    Its `loss_scale` is that of fp16, None in other formats; `scale` is its factor in this step, or 1."""
    judgement: Judgement
    """Says why a step updates nothing."""
    rules: Sequence[Callable[[LaneTurn], None]]
    """Each is called with this process's first turn of a pass, and may raise TaskError; see `build.py`."""
    looks: list[Look]
    """Checks of what user code does, which end after the first steps; one of SyncBatchNorm stays."""
    log: LogInterval | None
    """Which steps are logged, by their number, or as the last one of a stream; None: none is."""
    vote: Callable[[], Votes]
    """What this process wants after a step: to save, to stop or to end. One process that does is enough."""
    _has_begun: bool = field(default=False, init=False)
    """Whether the first round of the pass has started."""
    _is_due: bool = field(default=False, init=False)
    """Whether the step is logged by its number."""

    def begin(self, step: int) -> None:
        """Begin the pass over a step, which counts from 0."""
        self.phases.begin(DATA, step)
        forget_gradients(self.reducer.parameters)
        self.message.begin()
        self._has_begun = False
        self._is_due = self.log is not None and self.log.is_due(step)

    def run(self, losses: LaneLosses, batches: Iterator[LaneBatch], what: str) -> LaneTurn:
        """Run this process's lanes of a step, round by round, and return its last turn.

        Collective. Raises TaskError, in which the loss is called `what`, if one cannot be trained on.
        """
        for in_round in self.rounds(losses.begin(batches)):
            lanes = self.start(in_round, losses.lane)
            # Of each lane its loss. Where a loss is of all lanes, outputs, of which `of` makes its share.
            returned = losses.of(lanes, self.reducer.run(lanes))
            for batch, loss in zip(in_round, returned, strict=True):
                self.backward(batch, loss, what)
            turn = batch.turn
            del in_round, lanes, returned, batch, loss  # before the next batches are read
        return turn

    def rounds(self, batches: Iterable[LaneBatch]) -> Iterator[Sequence[LaneBatch]]:
        """Yield the batches of a step whose lanes run at once, on the device; see `Reducer.rounds`."""
        if self.spread.world.device.type != "cpu":
            batches = to_device(batches, self.spread.world.device)
        return self.reducer.rounds(iter(batches))

    def start(self, batches: Sequence[LaneBatch], lane_of: Callable[[LaneBatch], T]) -> list[T]:
        """Return the lanes of a round, before their forward: each begins with the buffers of the step.

        Raises TaskError if the step breaks a rule.
        """
        turn = batches[0].turn
        self.phases.begin(FORWARD, turn.step, turn.lane)
        if not self._has_begun:
            self._has_begun = True
            for rule in self.rules:
                rule(turn)
            for look in self.looks:
                with named_lane(batches[0]):
                    look.begin(turn)
        lanes = []
        for batch in batches:
            if self.buffers.are_any:
                self.buffers.begin()
            lanes.append(lane := lane_of(batch))
            for look in self.looks:
                look.before_forward(batch.turn, lane)
        return lanes

    def forwards(
        self, kept: StepBatches, lane_of: Callable[[LaneBatch], DerivedLane]
    ) -> Iterator[tuple[DerivedLane, Any]]:
        """Yield each lane with what it returned, before a second pass in which it gets a backward.

        Collective: every rank must iterate to the end.
        """
        for in_round in self.rounds(kept.copies()):
            lanes = self.start(in_round, lane_of)
            for lane, returned in zip(lanes, self.reducer.run(lanes, has_backward=False), strict=True):
                for look in self.looks:
                    look.after_forward(lane.batch.turn, None)
                self.buffers.discard()
                yield lane, returned
        self._has_begun = False

    def backward(self, batch: LaneBatch, loss: object, what: str) -> None:
        """Run the backward of a lane, after all that want it have what the lane gave.

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
            self.message.add(batch, loss)  # the run's first lane also fixes where the fp16 loss scale begins
            # The message and the gradients travel during the backward that follows.
            if turn.is_last:
                is_compared = self._is_due and self.spread.world.world_size > 1  # to find the slowest rank
                seconds = [self.phases.computed_seconds()] if is_compared else ()  # of earlier steps
                changes = self.buffers.changes
                self.message.send(batch, votes=self.vote(), buffer_changes=changes, computed_seconds=seconds)
            self.reducer.backward(turn, *loss.root(turn, self.message.scale))  # replicas: see above
            for look in self.looks:
                look.after_backward(turn)
        except BaseException as error:
            note_lane(error, batch)
            raise
        if not turn.is_last:
            self.phases.begin(DATA, turn.step)

    def finish(self, turn: LaneTurn, *, needs_norm: bool = True) -> Gradient:
        """Receive, divide and merge the buffers; where nothing may change, drop buffers and gradients.

        `turn` is this process's last.
        """
        norm, norms, loss_scale = None, None, self.message.loss_scale
        if self.spread.world.world_size > 1:
            self.phases.begin(COMMUNICATION, turn.step)
        totals = self.message.receive()
        is_logged = self._is_due
        if totals.to_source and self.log is not None:  # a stream has told whether this step is its last
            is_logged |= self.log.is_over()
        # The root of a step's only lane is its mean (`LaneLoss.root`), which spares a division. To divide
        # by the weight 0 is harmless: what comes of it is dropped below.
        self.reducer.finish(self.message.scale * (1.0 if len(turn.present) == 1 else totals.weight))
        if needs_norm or is_logged or loss_scale is not None:
            norms = self.reducer.gradient_norms()
            norm = torch.linalg.vector_norm(norms)  # before the task or clipping changes the gradient
        # Only fp16 looks at the gradient, and adapts its scale. Elsewhere one that is not finite is applied,
        # as in a loop by hand, and the next loss shows it.
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
            # Raises for a loss that is not finite, warns of weight 0; collective, so after the others.
            self.judgement.explain_no_update(totals, turn, self.message.evidence)
        return Gradient(turn, totals, norm, norms, allows_update, is_logged)


@final
@dataclass
class TrainStep:
    """Takes steps. Where the global weight is 0, or an fp16 gradient overflowed, no parameter changes.

    The scheduler steps all the same. After an overflow the losses count in the metrics; without weight there
    are none. A closure calls `gradient` and `end` instead of `run`.
    """

    pass_: Pass
    losses: LaneLosses
    """How a lane comes to its loss: by its own forward, or as a share in a loss of all lanes, which
    `begin` with a pass without backward over them."""
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
        """Leave the gradient of a step, clipped if asked for, or None in every `param.grad`.

        Collective: every rank must call this.
        """
        training = self.training
        self.pass_.begin(step)
        turn = self.pass_.run(self.losses, batches, self.runner.what)
        gradient = self.pass_.finish(turn, needs_norm=training.max_grad_norm is not None)
        for change in training.gradient_changes:  # before_update, then clipping
            change(gradient)
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
            training.after_update(gradient)
        if training.average is not None and gradient.allows_update:
            update_average(training.average, training.model)
        self.pass_.phases.begin(CALLBACK, step)
        heartbeat.has_trained = True
        self.metrics.interval.add(step, gradient.totals)
        report = self.metrics.report(gradient, learning_rate) if gradient.is_logged else None
        return StepReport(step, gradient.totals, report)
