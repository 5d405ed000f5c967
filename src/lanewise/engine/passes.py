"""Forward and backward of all lanes of a step: what the trainer and a user's own loop have in common."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.clock import StepClock
from lanewise.engine.lane import LaneLoss
from lanewise.errors import NonFiniteLossError, TaskError
from lanewise.lanes import LaneTurn, lane_seed
from lanewise.precision import LossScale
from lanewise.random_state import set_random_state
from lanewise.reduce import LaneBuffers, OwnTotals, ParameterWatch, Reducer, StepTotals, start_totals
from lanewise.world.world import World

logger = logging.getLogger(__name__)


class LanePasses:
    """Computes the gradient of one model, over all lanes of a step, again and again.

        for batch in passes.run(batches):        # the lanes that this process carries
            passes.backward(loss_of(batch))
        optimizer.step()                         # gradients are the weighted mean over the global batch

    Args:
        model: the module whose gradients are reduced.
        reducer: sums them.
        world: the processes.
        clock: told what the time goes to.
        num_lanes: lanes of the run.
        seed: seed of the run.
        loss_scale: keeps gradients in range; None where nothing is scaled.
        modules: all modules whose forward runs in a lane, for their buffers; may grow until the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        world: World,
        clock: StepClock,
        *,
        num_lanes: int,
        seed: int,
        loss_scale: LossScale | None,
        modules: Sequence[nn.Module],
    ) -> None:
        self._reducer = reducer
        self._world = world
        self._clock = clock
        self._num_lanes = num_lanes
        self._seed = seed
        self.loss_scale = loss_scale
        self._watch = ParameterWatch(model)
        self._buffers = LaneBuffers(modules, world, num_lanes)
        self._batch: LaneBatch | None = None
        self._own: list[OwnTotals] = []
        self._own_samples: dict[int, tuple[int, ...]] = {}
        self._is_first_step = True
        self.vote: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        """Asked in each step whether this process wants to save after it, and to stop."""
        self.turn: LaneTurn
        """The last turn of this process."""
        self.totals: StepTotals
        """The loss and weight of the last step."""
        self.grad_norm: torch.Tensor
        """L2 norm of the last step's gradient, a scalar on the device."""
        self.allow_update = False
        """Whether the last step has a gradient, otherwise None: it had weight, and in fp16 no overflow."""

    def run(self, batches: Iterator[LaneBatch], repeat: int = 0) -> Iterator[LaneBatch]:
        """Yield the micro-batches of a step, on the device, each under the random state of its lane.

        Each needs one `backward` before the next is asked for. When the iterator ends, every `param.grad`
        holds the weighted mean over the global batch.

        Collective: every rank must run it to the end, with the batches of its own lanes.

        Args:
            batches: consumed for one step.
            repeat: counts the passes over the same batches, which get other random numbers.

        Raises:
            TaskError: if the model cannot be trained so.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        self._clock.restart()  # an evaluation may have come between
        self._own, self._own_samples = [], {}
        self._drop_gradients()
        for batch in batches:
            self._clock.lap("data")
            turn = self.turn = batch.turn
            if not self._own:
                self._watch.check(turn.step)
            set_random_state(lane_seed(self._seed, turn.step, turn.lane, repeat))
            self._buffers.begin()
            self._batch = batch
            if batch.indices:
                yield batch
                if self._batch is not None:
                    raise TaskError(
                        f"a lane of step {turn.step} had no backward. Call it once for each micro-batch, "
                        "with a loss of weight 0 if there is nothing to learn from it."
                    )
            else:
                self._backward(None, batch)
            if turn.is_last:
                break
        self._finish()

    def backward(self, loss: object, what: str = "the loss given to backward") -> None:
        """Compute the gradients of a lane. Collective for the last lane of a step.

        Args:
            loss: a mean over the micro-batch's samples, or a `Loss`.
            what: how to call it in an error.

        Raises:
            TaskError: if there is no micro-batch to which the loss could belong, or it cannot be trained on.
        """
        if self._batch is None:
            raise TaskError(
                "backward was called twice for one micro-batch, or outside of the loop over them. "
                "Add the losses of a micro-batch up, and call it once."
            )
        self._backward(LaneLoss.check(loss, len(self._batch.indices), what), self._batch)

    def check(self) -> None:
        """Look at what the last step left to check, after the last one of a run.

        Raises:
            TaskError: if it broke the contract of buffers.
        """
        self._buffers.check()

    def close(self) -> None:
        """Stop what runs in the background."""
        self._reducer.close()

    def _backward(self, loss: LaneLoss | None, batch: LaneBatch) -> None:
        self._clock.lap("forward")
        turn = batch.turn
        self._batch = None
        self._buffers.end(turn)
        factor = self._factor(0.0 if loss is None else loss.weight)
        loss_sum = None if loss is None else loss.sum
        if loss is not None:
            known = torch.zeros((), device=self._world.device) if loss_sum is None else loss_sum.detach()
            self._own.append(OwnTotals(known.double(), loss.weight))
            self._own_samples[turn.lane] = batch.indices
            if self._is_first_step:
                self._unit = "samples" if loss.is_sample_mean else "units of the task's Loss"
        scaled = loss_sum if loss_sum is None or factor == 1.0 else loss_sum * factor
        connected = self._reducer.connect(turn, scaled)
        if turn.is_last:  # all own weights are known: the exchange overlaps the last backward
            self._wait_for_totals = start_totals(
                self._world, self._num_lanes, turn.num_present_lanes, self._own, self.vote()
            )
        self._reducer.backward(turn, connected)
        self._clock.lap("communication" if turn.is_last and self._world.world_size > 1 else "backward")

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
        self._reducer.finish(totals.weight * self._factor(0.0))
        gradients = [p.grad for p in self._reducer.parameters if p.grad is not None]
        self.grad_norm = nn.utils.get_total_norm(gradients)
        self.allow_update = totals.allow_update
        if totals.allow_update:
            self._buffers.merge()
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
        for parameter in self._reducer.parameters:
            parameter.grad = None

    def _describe_first(self) -> None:
        """Say what only the first step could show. Collective."""
        unused = self._watch.unused(self._world)
        if self._world.rank:
            return
        logger.info(
            "a step's loss and gradient are the mean over its %s: %g in the first",
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
