"""The gradient of a step: what the trainer, the user's own loop and verification have in common."""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol, final

import torch
from torch import nn

from lanewise.config import Equality
from lanewise.data import LaneBatch
from lanewise.device.accelerator import start_copy_to_host
from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.step.changed_parameters import (
    ChangedParameters,
    held_modules,
    held_parameters,
)
from lanewise.engine.step.clock import StepClock
from lanewise.engine.step.collectives import CollectiveDetector
from lanewise.engine.step.foreign_leaves import ForeignLeaves
from lanewise.engine.step.lane_error import note_lane
from lanewise.engine.step.lane_loss import LaneLoss, LaneShare
from lanewise.engine.step.look import Look
from lanewise.engine.step.losses import StepLosses
from lanewise.engine.step.message import StepTotals
from lanewise.engine.step.own_generators import OwnGenerators
from lanewise.engine.step.parameters import ParameterMonitor
from lanewise.engine.step.shared_backward import SharedBackward
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.precision import LossScale
from lanewise.reduce import Reducer
from lanewise.task import Task
from lanewise.transforms import compare_runs
from lanewise.watch.heartbeat import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, heartbeat
from lanewise.world.world import World

logger = logging.getLogger(__name__)


class IsLogged(Protocol):
    """Tells whether a step is logged; see `LogInterval.ends_with`."""

    def __call__(self, step: int, upcoming: Sequence[int] | None = None, /) -> bool:
        """Tell it, of a stream once the number of samples of each lane in the next step is known."""
        ...


class StepGradient(NamedTuple):
    """What a pass over the lanes of a step found; the gradient itself is in every `param.grad`."""

    turn: LaneTurn
    """The last turn of this process in the step."""
    totals: StepTotals
    """Loss and weight."""
    norm: torch.Tensor | None
    """L2 norm of the gradient, a scalar on the device; None where nothing needs it."""
    norms: torch.Tensor | None
    """L2 norm of each parameter's gradient, [num_parameters], of which `norm` is made; None likewise."""
    allows_update: bool
    """Whether the weights may be updated: the step has weight, and fp16 did not overflow. If not, every
    `grad` is None."""
    is_logged: bool
    """Whether the step is logged, so that it has the norms."""


@final
class LaneGradients:
    """Makes the gradient of one model over the global batch, in a pass over the lanes of a step.

        for lanes in gradients.rounds(batches):      # micro-batches of this process; one for each replica
            losses = ...                             # under the random state of each lane
            gradients.backward(losses)                    # backward; the last one overlaps the reduction
        gradient = gradients.finish()                # divides the sum over all lanes by the global weight

    Args:
        reducer: has the model, and sums the gradients.
        world: the processes.
        clock: measures the phases of the step.
        placement: which process carries which lanes.
        equality: the grade that the run promises.
        loss_scale: keeps fp16 gradients in range; None where losses are not scaled.
        modules: for each replica, all modules whose forward runs in a lane; their buffers are merged. Modules
            may be added until the first step.
        vote: called before the last backward of each step; returns whether this process wants to save after
            the step, and whether it wants to stop the run.
        metric_names: names of metrics that losses reported before the run was resumed.
        task: of the run; its attributes are looked at in the first steps, as the model's are.
    """

    def __init__(  # noqa: PLR0913 - the parts of a run, as arguments
        self,
        reducer: Reducer,
        world: World,
        clock: StepClock,
        *,
        placement: Placement,
        equality: Equality,
        loss_scale: LossScale | None,
        modules: Sequence[Collection[nn.Module]],
        vote: Callable[[], tuple[bool, bool, bool]] = lambda: (False, False, False),
        metric_names: Collection[str] = (),
        task: Task | None = None,
    ) -> None:
        self.reducer = reducer
        self.world = world
        self.placement = placement
        self.equality: Equality = equality
        self.loss_scale = loss_scale
        self._vote = vote
        self.clock = clock
        self.losses = StepLosses(world, placement, loss_scale, metric_names, equality)
        self._buffers = LaneBuffers(modules, world, placement)
        self._monitor = ParameterMonitor(reducer)
        self._collectives = CollectiveDetector(reducer, world, placement, equality)
        holders, held = ({}, {}) if task is None else ({"task": task}, held_parameters(task))
        # Every process calls batch_loss once in each step, and may fill a table in it.
        by_lanes = task is not None and task.loss_method() != "batch_loss"
        self.foreign_leaves = ForeignLeaves(reducer, modules[0], held)
        self._looks: list[Look] = [
            ChangedParameters(reducer, world, held, held_modules(task) if by_lanes else {}),
            self.foreign_leaves,
            OwnGenerators(reducer.replicas[0], **holders),
        ]
        """What is still looked at; empty after the first steps."""
        if len(reducer.replicas) > 1:
            self._looks.append(SharedBackward(equality))
        self._open: list[LaneBatch] = []
        self._unit: str | None = None
        self._is_first_step = True

    @property
    def looks_at_leaves(self) -> bool:
        """Whether `foreign_leaves` has not seen enough yet."""
        return self.foreign_leaves in self._looks

    def rounds(
        self,
        batches: Iterator[LaneBatch],
        is_logged: IsLogged = lambda *_: False,
        *,
        has_backward: bool = True,
    ) -> Iterator[list[LaneBatch]]:
        """Yield the micro-batches of a step: as many at once as the reducer has replicas.

        Each round needs one `backward` before the next round begins. A process without samples in the step
        gets one empty micro-batch.

        Collective: every rank must iterate to the end, with the batches of its own lanes, and then call
        `finish`.

        Args:
            batches: on the device; consumed for one step.
            is_logged: tells whether a step is logged, the same on every rank: then the norm of its gradient
                is computed, and the processes tell each other how long they compute. Of a stream it is
                asked again when the number of samples of each lane in the next step is known.
            has_backward: False where the rounds get no `backward`, and the step another pass with them.

        Raises:
            TaskError: if the trainable parameters changed, a lane had no backward, or processes with
                different numbers of lanes have forwards that communicate.
        """
        self.losses.begin()
        self._monitor.begin_step()
        for parameter in self.reducer.parameters:
            parameter.grad = None
        batches = self.reducer.pad(batches)
        is_last, is_first = False, True
        while not is_last:
            in_round: list[LaneBatch] = []
            while len(in_round) < len(self.reducer.replicas) and not is_last:
                in_round.append(next(batches))
                self.clock.lap(DATA, begins=FORWARD)
                is_last = in_round[-1].turn.is_last
            turn = in_round[-1].turn
            heartbeat.note = (FORWARD, turn.step, turn.lane)
            if is_first:
                self._is_logged, self._asks = is_logged(turn.step), is_logged
                self._monitor.check(turn.step)
                self._collectives.begin_step(turn)
                for look in self._looks:
                    look.begin(turn)
                is_first = False
            for replica in range(len(in_round)):
                self._buffers.begin(replica)
            if self._is_first_step:
                self._collectives.before_forward()
            self._open = in_round
            yield in_round
            if not has_backward:
                if self._is_first_step:
                    self._collectives.after_forward(turn)
                self._open = []
                self._buffers.discard()
                self.clock.lap(FORWARD, begins=DATA)
            if self._open:
                raise TaskError(
                    f"a lane of step {turn.step + 1} had no backward. Call step.backward(loss), which is not "
                    "loss.backward(), once for each micro-batch; give a loss of weight 0 if there is nothing "
                    "to learn from it."
                )

    def backward(self, losses: Sequence[object], what: str = "the loss given to backward") -> None:
        """Run the backward of a round. Collective for the last lane of a step.

        Args:
            losses: for each lane a mean over the micro-batch's samples, or a `Loss`; None for a lane without
                samples.
            what: the name of the losses in an error message.

        Raises:
            TaskError: if there is no micro-batch to which a loss could belong, a loss cannot be trained on,
                gradients came from elsewhere, or the forward communicated with other processes.
        """
        in_round, self._open = self._open, []
        if not in_round:
            raise TaskError(
                "backward was called twice for one micro-batch, or outside of the loop over them. "
                "Add the losses of a micro-batch up, and call it once."
            )
        first = in_round[0].turn
        if self._is_first_step:
            self._collectives.after_forward(first)
        checked: list[LaneLoss | LaneShare | None] = []
        for batch, loss in zip(in_round, losses, strict=True):
            known = loss if isinstance(loss, LaneShare | LaneLoss) else LaneLoss.of(batch, loss, what)
            checked.append(known if batch.turn.positions else None)
        self.clock.lap(FORWARD, begins=BACKWARD)
        for replica, batch in enumerate(in_round):
            self._buffers.end(batch.turn, batch.num_samples, replica)
        self._monitor.before_backward(first)
        for look in self._looks:
            look.before_backward(
                [batch.turn for batch in in_round], [None if loss is None else loss.value for loss in checked]
            )
        for batch, loss in zip(in_round, checked, strict=True):
            try:
                self._backward(batch, loss)
            except BaseException as error:
                note_lane(error, batch)
                raise
        self._monitor.after_backward()
        for look in self._looks:
            look.after_backward([batch.turn for batch in in_round])
        self._turn = in_round[-1].turn
        is_reduced = self._turn.is_last and self.world.world_size > 1
        self.clock.lap(COMMUNICATION if is_reduced else BACKWARD, begins=DATA)

    def _backward(self, batch: LaneBatch, loss: LaneLoss | LaneShare | None) -> None:
        turn = batch.turn
        told = loss.told if isinstance(loss, LaneShare) else loss
        if told is not None and self._unit is None:
            self._unit = "its samples" if told.is_sample_mean else "the units that its Loss counts"
        value, factor = self.losses.add(batch, loss)
        if value is None:
            self._collectives.refuse_missing_backward(turn)
        if turn.is_last:  # the exchange overlaps this backward
            seconds = self.clock.computed_seconds() if self._is_logged else None
            self.losses.start_exchange(turn, self._vote(), self._buffers.changes(), seconds, batch.upcoming)
        self.reducer.backward(turn, value, factor)

    def finish(self, *, needs_norm: bool = True) -> StepGradient:
        """Complete the gradient of the step: the weighted mean over the global batch.

        Collective: every rank must call this, with the same arguments.

        Args:
            needs_norm: whether to compute the norm of the gradient even if neither a line of metrics nor a
                loss scale needs it.

        Raises:
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        heartbeat.note = (COMMUNICATION, self._turn.step, None)
        totals = self.losses.finish()
        if totals.upcoming is not None:  # only now it is known whether this step is the last one
            self._is_logged = self._asks(self._turn.step, totals.upcoming)
        self.reducer.finish(self.losses.divisor(totals, self._turn))
        norm = norms = None
        if needs_norm or self._is_logged or self.loss_scale is not None:
            norms = self.reducer.gradient_norms()
            norm = torch.linalg.vector_norm(norms)
        allows_update = totals.allow_update
        if allows_update and self.loss_scale is not None:
            assert norm is not None
            allows_update = math.isfinite(start_copy_to_host(norm)())
            self.loss_scale.update(is_finite=allows_update)
        if allows_update:
            self._buffers.merge(totals.buffer_changes)
        else:  # a step that updates nothing leaves the whole model as it was
            self._buffers.discard()
            for parameter in self.reducer.parameters:
                parameter.grad = None
        self.clock.lap(COMMUNICATION if self.world.world_size > 1 else BACKWARD, begins=OPTIMIZER)
        if self._looks:
            self._looks = [look for look in self._looks if not look.finish()]
        if self._is_first_step:
            self._describe_first_step(totals)
        self.losses.require_finite(totals, self._turn)
        if not totals.weight:
            logger.warning(
                "step %d: the global batch has weight 0, so nothing was updated", self._turn.step + 1
            )
        return StepGradient(self._turn, totals, norm, norms, allows_update, self._is_logged)

    def check(self) -> None:
        """Raise the error of the last step, whose comparison of buffers nobody has waited for yet.

        Raises:
            TaskError: if an integer buffer differed between lanes.
        """
        self._buffers.check()

    def _describe_first_step(self, totals: StepTotals) -> None:
        """Log the unit of the weights and the unused parameters, which the first step shows. Collective."""
        self._is_first_step = False
        compare_runs(self.reducer.replicas, is_on=False)
        unused = self._monitor.unused(self.world)
        if self.world.rank:
            return
        logger.info(
            "loss and gradient of a step are means over %s; the first step has %s",
            self._unit,
            f"{totals.weight:,g}",
        )
        if unused:
            logger.warning(
                "no lane of the first step used these parameters, so their gradient is zero: %s",
                ", ".join(unused),
            )
