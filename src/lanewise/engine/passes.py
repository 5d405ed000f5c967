"""Forward and backward of all lanes of a step: what the trainer and a user's own loop have in common."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.clock import StepClock
from lanewise.engine.crosstalk import Crosstalk
from lanewise.engine.lane import LaneLoss, move, named_lane
from lanewise.errors import NonFiniteLossError, TaskError
from lanewise.lanes import LaneTurn, lane_seed, update_seed
from lanewise.precision import LossScale
from lanewise.random_state import set_random_state
from lanewise.reduce import (
    LaneBuffers,
    LaneWork,
    OwnTotals,
    ParameterWatch,
    Reducer,
    StepTotals,
    start_totals,
)
from lanewise.world.accelerator import float64_device
from lanewise.world.world import World

logger = logging.getLogger(__name__)


class LanePasses:
    """Computes the gradient of one model, over all lanes of a step, again and again.

        for group in passes.groups(batches):     # the lanes that this process carries, those at once together
            losses = passes.run(group, forward, loss, context)
            passes.backward(losses)
        optimizer.step()                         # gradients are the weighted mean over the global batch

    Args:
        reducer: runs the lanes, and sums their gradients.
        world: the processes.
        clock: told what the time goes to.
        num_lanes: lanes of the run.
        seed: seed of the run.
        loss_scale: keeps gradients in range; None where nothing is scaled.
        modules: for each replica, all modules whose forward runs in a lane, for their buffers; may grow until
            the first step.
        is_exact: whether the run is in `exact`.
    """

    def __init__(
        self,
        reducer: Reducer,
        world: World,
        clock: StepClock,
        *,
        num_lanes: int,
        seed: int,
        loss_scale: LossScale | None,
        modules: Sequence[Sequence[nn.Module]],
        is_exact: bool,
    ) -> None:
        self.reducer = reducer
        """Has the model."""
        self._world = world
        self._clock = clock
        self._num_lanes = num_lanes
        self._seed = seed
        self.loss_scale = loss_scale
        self._watch = ParameterWatch(reducer)
        self._buffers = LaneBuffers(modules, world, num_lanes)
        self._crosstalk = Crosstalk(world, num_lanes, is_exact=is_exact)
        self._group: list[LaneBatch] = []
        self._own: list[OwnTotals] = []
        self._own_samples: dict[int, tuple[int, ...]] = {}
        self._is_first_step = True
        self.turn: LaneTurn
        """The last turn of this process."""
        self.totals: StepTotals
        """The loss and weight of the last step."""
        self.grad_norm: torch.Tensor
        """L2 norm of the last step's gradient, a scalar on the device."""
        self.allow_update = False
        """Whether the last step has a gradient, otherwise None: it had weight, and in fp16 no overflow."""

    def groups(
        self,
        batches: Iterator[LaneBatch],
        repeat: int = 0,
        vote: Callable[[], tuple[bool, bool]] = lambda: (False, False),
    ) -> Iterator[list[LaneBatch]]:
        """Yield the micro-batches of a step, on the device: as many at once as the reducer has replicas.

        Each group needs one `backward` before the next is asked for. When the iterator ends, every
        `param.grad` holds the weighted mean over the global batch, and every rank has the same random state,
        whichever lanes it carries.

        Collective: every rank must run it to the end, with the batches of its own lanes.

        Args:
            batches: consumed for one step.
            repeat: counts the passes over the same batches, which get other random numbers.
            vote: asked whether this process wants to save after the step, and to stop.

        Raises:
            TaskError: if the model cannot be trained so.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        self._clock.restart()  # an evaluation may have come between
        self._own, self._own_samples = [], {}
        self._repeat = repeat
        self._vote = vote
        self._drop_gradients()
        self._watch.begin_step()
        is_last = False
        while not is_last:
            group: list[LaneBatch] = []
            while len(group) < len(self.reducer.replicas) and not is_last:
                batch = next(batches)
                self._clock.lap("data")
                is_last = batch.turn.is_last
                group.append(batch)
            turn = self.turn = group[-1].turn
            if not self._own:
                self._watch.check(turn.step)
                self._crosstalk.begin_step(turn)
            for place in range(len(group)):
                self._buffers.begin(place)
            self._group = group
            if turn.positions or turn.borrowed:
                if self._is_first_step:
                    self._crosstalk.before_forward()
                yield group
                if self._group:
                    raise TaskError(
                        f"a lane of step {turn.step} had no backward. Call it once for each micro-batch, "
                        "with a loss of weight 0 if there is nothing to learn from it."
                    )
            else:
                self._backward(group, [None])
        self._finish()
        self.set_update_state()

    def run(
        self,
        group: Sequence[LaneBatch],
        forward: Callable[[nn.Module, Any], Any],
        loss: Callable[[Any, Any], Any],
        context: Callable[[], AbstractContextManager[object]],
    ) -> list[Any]:
        """Compute the losses of a group, each on the reducer's replica for it and under its random state.

        Args:
            group: of `groups`.
            forward: from a module and a batch to outputs.
            loss: from outputs and a batch to a loss.
            context: entered around both.
        """

        def named(batch: LaneBatch, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def call(*arguments: Any) -> Any:
                with named_lane(batch):
                    return function(*arguments)

            return call

        return self.reducer.run(
            [
                LaneWork(
                    batch.data,
                    partial(self.set_random_state, batch.turn),
                    named(batch, forward),
                    named(batch, loss),
                    context,
                    move,
                )
                for batch in group
            ]
        )

    def set_random_state(self, turn: LaneTurn) -> None:
        """Set the random state of a lane, in the pass that is under way."""
        set_random_state(lane_seed(self._seed, turn.step, turn.lane, self._repeat))

    def set_update_state(self) -> None:
        """Set the random state of what follows the lanes of the pass: the same on every rank."""
        set_random_state(update_seed(self._seed, self.turn.step, self._repeat))

    def backward(self, losses: Sequence[object], what: str = "the loss given to backward") -> None:
        """Compute the gradients of a group. Collective for the last lane of a step.

        Args:
            losses: for each lane a mean over the micro-batch's samples, or a `Loss`.
            what: how to call them in an error.

        Raises:
            TaskError: if there is no micro-batch to which a loss could belong, it cannot be trained on, or
                the forward talked to other processes.
        """
        if not self._group:
            raise TaskError(
                "backward was called twice for one micro-batch, or outside of the loop over them. "
                "Add the losses of a micro-batch up, and call it once."
            )
        if self._is_first_step and not self.reducer.forward_is_collective:
            self._crosstalk.after_forward(self.turn)
        checked: list[LaneLoss | None] = []
        for loss, batch in zip(losses, self._group, strict=True):
            with named_lane(batch):
                # Nothing of a borrowed batch counts.
                is_own = bool(batch.indices)
                checked.append(LaneLoss.check(loss, len(batch.indices), what) if is_own else None)
        self._backward(self._group, checked)

    def check(self) -> None:
        """Look at what the last step left to check, after the last one of a run.

        Raises:
            TaskError: if it broke the contract of buffers.
        """
        self._buffers.check()

    def close(self) -> None:
        """Stop what runs in the background."""
        self.reducer.close()

    def _backward(self, group: Sequence[LaneBatch], losses: Sequence[LaneLoss | None]) -> None:
        self._clock.lap("forward")
        self._group = []
        for place, batch in enumerate(group):
            self._buffers.end(batch.turn, place)
        self._watch.before_backward(group[0].turn)
        for batch, loss in zip(group, losses, strict=True):
            with named_lane(batch):
                self._backward_lane(batch, loss)
        self._watch.after_backward(group[0].turn)
        is_last = group[-1].turn.is_last
        self._clock.lap("communication" if is_last and self._world.world_size > 1 else "backward")

    def _backward_lane(self, batch: LaneBatch, loss: LaneLoss | None) -> None:
        turn = batch.turn
        factor = self._factor(0.0 if loss is None else loss.weight)
        loss_sum = None if loss is None else loss.sum
        if loss is not None:
            known = torch.zeros((), device=self._world.device) if loss_sum is None else loss_sum.detach()
            self._own.append(OwnTotals(known.to(float64_device(self._world.device)).double(), loss.weight))
            self._own_samples[turn.lane] = batch.indices
            if self._is_first_step:
                self._unit = "samples" if loss.is_sample_mean else "units that its Loss counts"
        scaled = loss_sum if loss_sum is None or factor == 1.0 else loss_sum * factor
        connected = self.reducer.connect(turn, scaled)
        if turn.is_last:  # all own weights are known: the exchange overlaps the last backward
            self._wait_for_totals = start_totals(
                self._world,
                self._num_lanes,
                turn.num_present_lanes,
                self._own,
                self._vote(),
                self._buffers.changes(),
            )
        self.reducer.backward(turn, connected)

    def _factor(self, weight: float) -> float:
        """Return what loss sums are multiplied by. Collective in the first lane of each process."""
        if self.loss_scale is None:
            return 1.0
        if not self.loss_scale.has_unit:
            first_weight = self._world.all_gather_object(weight)[0]  # of lane 0, whoever carries it
            self.loss_scale.set_unit(self._num_lanes * first_weight)
        return self.loss_scale.factor

    def _finish(self) -> None:
        """Make the gradients of the step whole. Collective."""
        totals = self.totals = self._wait_for_totals()
        self.reducer.finish(totals.weight * self._factor(0.0))
        self.grad_norm = self.reducer.grad_norm()
        self.allow_update = totals.allow_update
        if totals.allow_update:
            self._buffers.merge(totals.buffer_changes)
        else:
            self._buffers.discard()
        if totals.allow_update and self.loss_scale is not None:
            self.allow_update = math.isfinite(self.grad_norm)
            self.loss_scale.update(is_finite=self.allow_update)
        if not self.allow_update:
            self._drop_gradients()
        self._clock.lap("communication" if self._world.world_size > 1 else "backward")
        if self._is_first_step:
            self._describe_first()
            self._is_first_step = False
        self._require_finite()
        if not totals.weight:
            logger.warning("step %d: the global batch has weight 0, so nothing was updated", self.turn.step)

    def _drop_gradients(self) -> None:
        for parameter in self.reducer.parameters:
            parameter.grad = None

    def _describe_first(self) -> None:
        """Say what only the first step could show. Collective."""
        unused = self._watch.unused(self._world)
        if self._world.rank:
            return
        logger.info(
            "loss and gradient of a step are means over its %s; the first step has %g",
            self._unit,
            self.totals.weight,
        )
        if unused:
            logger.warning(
                "no lane of the first step used these parameters, so their gradient is zero: %s",
                ", ".join(unused),
            )

    def _require_finite(self) -> None:
        """Raise where a lane's loss is not finite, with its samples. Collective then."""
        if not self.totals.non_finite_lanes:
            return
        samples: dict[int, tuple[int, ...]] = {}
        for rank_samples in self._world.all_gather_object(self._own_samples):
            samples |= rank_samples
        described = "\n".join(
            f"  lane {lane.lane}: loss {lane.loss_sum}, samples {list(samples[lane.lane])}"
            for lane in self.totals.non_finite_lanes
        )
        raise NonFiniteLossError(
            f"the loss is not finite in step {self.turn.step} (epoch {self.turn.epoch}), which updated "
            f"nothing.\n{described}\nLook at these samples, or lower the learning rate."
        )
