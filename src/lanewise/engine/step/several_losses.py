"""A loss of several terms, each divided by its own weight over the global batch: tokens here, samples there.

The gradient of a step is the sum over the terms of (sum over all lanes of grad(sum)) / (sum over all lanes of
weight). So the weights of all lanes must be known before the first backward. `Task.loss_weights` counts them
in the batch; where it returns None, each lane's forward runs twice, and the first time its loss tells them.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch

from lanewise.data import LaneBatch
from lanewise.engine.step.lane_error import named_lane
from lanewise.engine.step.lanes import DerivedLane, LaneLosses, LaneRunner, StepBatches, TaskLane, to_device
from lanewise.engine.step.step import Pass
from lanewise.engine.step.terms import LaneLoss, add_terms, check_each, terms_of
from lanewise.errors import TaskError
from lanewise.processes.watch.heartbeat import COMMUNICATION, DATA

logger = logging.getLogger(__name__)


@final
class SeveralLosses(LaneLosses):
    """Runs the lanes of a step for a task that has `loss_weights`. See the module.

    Args:
        pass_: hands out the lanes of the model.
        runner: runs the lanes of the task.
    """

    def __init__(self, pass_: Pass, runner: LaneRunner) -> None:
        self._pass = pass_
        self._runner = runner
        self._runs_twice: bool | None = None
        """Whether only the loss knows the weights; None until a step has samples, in which all agree."""
        self._num_terms = 0
        self.lane = self._deriving(self._add)
        self._counted: dict[int, list[float]] = {}
        """Of the step, how many samples each lane here has, and the weights of its terms."""
        self._of_all: tuple[int, Sequence[float]] = (0, ())
        """Of the step, the same over all lanes."""

    def begin(self, batches: Iterator[LaneBatch]) -> StepBatches:
        kept = StepBatches(batches)
        self._counted = self._count(kept)
        if self._runs_twice:
            self._counted = self._count_by_forwards(kept)
        self._of_all = self._add_up(list(self._counted.values()), kept.turn.step)
        return kept

    def _add(self, batch: LaneBatch, terms: Sequence[LaneLoss]) -> LaneLoss:
        """Return the sum of the terms of a lane."""
        if batch.has_samples:  # not one that repeats another, so that all processes communicate as often
            self._require_weights(terms, self._counted[batch.turn.lane][1:])
        num_samples, weights = self._of_all
        return add_terms(terms, weights, num_samples, batch.num_samples)

    def _count(self, kept: StepBatches) -> dict[int, list[float]]:
        """Return, for each lane that has samples, how many, and the weights that its batch tells.

        Collective until a step has samples, in which the processes agree whether batches tell any.
        """
        counted: dict[int, list[float]] = {}
        tells: set[bool] = set()
        for batch in to_device(kept, self._pass.spread.world.device) if not self._runs_twice else ():
            if not batch.has_samples:
                continue
            with named_lane(batch):
                weights = self._runner.task.loss_weights(batch.data)
                tells.add(weights is not None)
                weights_of_lane = () if weights is None else map(float, weights)
                counted[batch.turn.lane] = [batch.num_samples, *weights_of_lane]
        if self._runs_twice is None:
            tells = {
                row for of_rank in self._pass.spread.world.all_gather_tree(sorted(tells)) for row in of_rank
            }
            self._runs_twice = False in tells if tells else None  # in a step without samples none does
            if self._runs_twice and self._pass.spread.world.rank == 0:
                logger.info("each forward runs twice: loss_weights does not know the weights of the losses")
        if tells - {not self._runs_twice}:
            raise TaskError(
                f"loss_weights of {type(self._runner.task).__name__} returns None for some batches only. "
                "Return the weights of all batches, or None for all."
            )
        return counted

    def _count_by_forwards(self, kept: StepBatches) -> dict[int, list[float]]:
        """Run each lane's forward and loss, drop the graph, and return what `_count` does."""

        def count(batch: LaneBatch, terms: Sequence[LaneLoss]) -> list[float]:
            return [batch.num_samples, *(term.weight for term in terms)]

        return {
            lane.batch.turn.lane: of_lane
            for lane, of_lane in self._pass.forwards(kept, self._deriving(count))
            if lane.batch.has_samples
        }

    def _deriving(
        self, derive: Callable[[LaneBatch, Sequence[LaneLoss]], object]
    ) -> Callable[[LaneBatch], DerivedLane]:
        """Return what makes a lane of a batch that gives what `derive` makes of its checked terms."""

        def lane_of(batch: LaneBatch) -> DerivedLane:
            own = self._runner.lane(batch)
            return DerivedLane(
                batch, own.forward, lambda outputs, data: derive(batch, self._terms(own, outputs, data))
            )

        return lane_of

    def _terms(self, lane: TaskLane, outputs: Any, data: Any) -> list[LaneLoss]:
        """Return the checked terms of a lane's loss."""
        returned = lane.loss(outputs, data)
        terms = terms_of(returned)
        if not terms or len(terms) != (self._num_terms or len(terms)):
            raise TaskError(
                f"{self._runner.what} must be a list of {self._num_terms or 'several'} Loss, as "
                f"loss_weights is there: got {returned!r:.80}. Return a term for each of its weights."
            )
        return check_each(terms, lane.batch.num_samples, self._runner.what)

    def _require_weights(self, terms: Sequence[LaneLoss], announced: Sequence[float]) -> None:
        """Raise TaskError if the terms of a lane have other weights than the ones that were added up."""
        weights = [term.weight for term in terms]
        if not all(map(partial(math.isclose, rel_tol=1e-5), weights, announced)):
            raise TaskError(
                f"{self._runner.what} has the weights {weights}, and loss_weights gave {list(announced)}. "
                "Each term is divided by what loss_weights returns: return the same weights from both."
            )

    def _add_up(self, counted: Sequence[Sequence[float]], step: int) -> tuple[int, list[float]]:
        """Return the number of samples of all lanes, and the weight of each term. Collective."""
        world, phases = self._pass.spread.world, self._pass.phases
        phases.begin(COMMUNICATION, step)
        if not self._num_terms:
            lengths = {len(of_lane) - 1 for of_lane in counted}
            lengths = set().union(*world.all_gather_tree(sorted(lengths)))
            if len(lengths) > 1:
                raise TaskError(
                    f"the lanes have different numbers of losses: {sorted(lengths)}. Return as many in every "
                    "lane, with the weight 0 where there is nothing to learn."
                )
            self._num_terms = max(lengths, default=0)
        most = self._pass.spread.placement.most
        numbers = torch.zeros(most, 1 + self._num_terms, dtype=torch.float64)
        for row, of_lane in zip(numbers, counted, strict=False):
            if len(of_lane) != len(row):
                raise TaskError(
                    f"loss_weights returned {len(of_lane) - 1} weights: got {self._num_terms} before."
                )
            row[:] = torch.tensor(of_lane, dtype=torch.float64)
        gathered = world.start_all_gather_to_host(numbers.to(world.device))().flatten(0, 1)
        num_samples, *weights = (math.fsum(column) for column in gathered.T.tolist())
        phases.begin(DATA, step)
        return int(num_samples), weights
