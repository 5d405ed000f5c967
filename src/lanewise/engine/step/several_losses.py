"""A loss of several terms, each divided by its own weight over the global batch: tokens here, samples there.

The gradient of a step is the sum over the terms of (sum over all lanes of grad(sum)) / (sum over all lanes of
weight). So the weights of all lanes must be known before the first backward. `Task.loss_weights` counts them
in the batch; where it returns None, each lane's forward runs twice, and the first time its loss tells them.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.step.batches import StepBatches
from lanewise.engine.step.gradient import IsLogged, LaneGradients
from lanewise.engine.step.lane import LaneOfBatch, LaneRunner, TaskLane, to_device
from lanewise.engine.step.lane_error import named_lane
from lanewise.engine.step.lane_loss import LaneLoss, add_terms, check_each, terms_of
from lanewise.errors import TaskError
from lanewise.watch.heartbeat import COMMUNICATION, DATA

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _TermsLane(LaneOfBatch):
    """A lane whose loss has several terms; a `LaneWork`. Its loss is what `add` makes of the terms."""

    batch: LaneBatch
    lane: TaskLane
    add: Callable[[LaneBatch, object], Any]

    def forward(self, model: nn.Module, data: Any) -> Any:
        """See `LaneWork`."""
        return self.lane.forward(model, data)

    def loss(self, outputs: Any, data: Any) -> Any:
        """See `LaneWork`."""
        returned = self.lane.loss(outputs, data)
        with named_lane(self.batch):
            return self.add(self.batch, returned)


@final
class SeveralLosses:
    """Runs the lanes of a step for a task that has `loss_weights`. See the module.

    Args:
        gradients: of the model.
        runner: of the task.
    """

    def __init__(self, gradients: LaneGradients, runner: LaneRunner) -> None:
        self._gradients = gradients
        self._runner = runner
        self._runs_twice: bool | None = None
        """Whether only the loss knows the weights; None until the processes agree, in the first step."""
        self._num_terms = 0

    def run(self, batches: Iterator[LaneBatch], is_logged: IsLogged = lambda *_: False) -> None:
        """Run the forwards and backwards of a step; `LaneGradients.finish` completes it.

        Collective: every rank must call this, with the batches of its own lanes.

        Args:
            batches: consumed for one step, from where the reader left them.
            is_logged: see `LaneGradients.rounds`.
        """
        gradients, device = self._gradients, self._gradients.world.device
        kept = StepBatches(batches)
        counted = self._count(kept)
        if self._runs_twice:
            counted = self._count_by_forwards(kept)
        num_samples, weights = self._add_up(list(counted.values()))

        def add(batch: LaneBatch, returned: object) -> Any:
            terms = check_each(self._terms_of(returned), batch.num_samples, self._runner.what)
            if batch.has_samples:  # not one that repeats another, so that all processes communicate as often
                self._require_told(terms, counted[batch.turn.lane][1:])
            return add_terms(terms, weights, num_samples, batch.num_samples)

        for in_round in gradients.rounds(to_device(kept, device), is_logged):
            lanes = [_TermsLane(batch, self._runner.lane(batch), add) for batch in in_round]
            gradients.backward(gradients.reducer.losses(lanes), self._runner.what)

    def _count(self, kept: StepBatches) -> dict[int, list[float]]:
        """Return, for each lane that has samples, how many, and the weights that its batch tells.

        Collective in the first step, in which the processes agree whether batches tell any.
        """
        counted: dict[int, list[float]] = {}
        tells: set[bool] = set()
        for batch in to_device(kept, self._gradients.world.device) if not self._runs_twice else ():
            if not batch.has_samples:
                continue
            with named_lane(batch):
                weights = self._runner.task.loss_weights(batch.data)
                tells.add(weights is not None)
                told = () if weights is None else map(float, weights)
                counted[batch.turn.lane] = [batch.num_samples, *told]
        if self._runs_twice is None:
            tells = {
                one for of_rank in self._gradients.world.all_gather_tree(sorted(tells)) for one in of_rank
            }
            self._runs_twice = False in tells
            if self._runs_twice and self._gradients.world.rank == 0:
                logger.info("each forward runs twice: loss_weights does not know the weights of the losses")
        if tells - {not self._runs_twice}:
            raise TaskError(
                f"loss_weights of {type(self._runner.task).__name__} returns None for some batches only. "
                "Return the weights of all batches, or None for all."
            )
        return counted

    def _count_by_forwards(self, kept: StepBatches) -> dict[int, list[float]]:
        """Run each lane's forward and loss, drop the graph, and return what `_count` does."""

        def count(batch: LaneBatch, returned: object) -> list[float]:
            terms = check_each(self._terms_of(returned), batch.num_samples, self._runner.what)
            return [batch.num_samples, *(one.weight for one in terms)]

        gradients, counted = self._gradients, dict[int, list[float]]()
        batches = to_device(kept.copies(), gradients.world.device)
        for in_round in gradients.rounds(batches, has_backward=False):
            lanes = [_TermsLane(batch, self._runner.lane(batch), count) for batch in in_round]
            returned = gradients.reducer.forwards(lanes)
            counted |= {
                lane.turn.lane: one for lane, one in zip(lanes, returned, strict=True) if lane.has_samples
            }
        return counted

    def _terms_of(self, returned: object) -> Sequence[Any]:
        terms = terms_of(returned)
        if not terms or len(terms) != (self._num_terms or len(terms)):
            raise TaskError(
                f"{self._runner.what} must be a list of {self._num_terms or 'several'} Loss, as "
                f"loss_weights is there: got {returned!r:.80}. Return a term for each of its weights."
            )
        return terms

    def _require_told(self, terms: Sequence[LaneLoss], told: Sequence[float]) -> None:
        """Raise TaskError if the terms of a lane have other weights than the ones that were added up."""
        weights = [one.weight for one in terms]
        if not all(map(partial(math.isclose, rel_tol=1e-5), weights, told)):
            raise TaskError(
                f"{self._runner.what} has the weights {weights}, and loss_weights told {list(told)}. Each "
                "term is divided by what loss_weights tells: return the same weights from both."
            )

    def _add_up(self, counted: Sequence[Sequence[float]]) -> tuple[int, list[float]]:
        """Return the number of samples of all lanes, and the weight of each term. Collective."""
        world, clock = self._gradients.world, self._gradients.clock
        clock.lap(DATA, begins=COMMUNICATION)
        if not self._num_terms:
            lengths = {len(one) - 1 for one in counted}
            lengths = set().union(*world.all_gather_tree(sorted(lengths)))
            if len(lengths) > 1:
                raise TaskError(
                    f"the lanes have different numbers of losses: {sorted(lengths)}. Return as many in every "
                    "lane, with the weight 0 where there is nothing to learn."
                )
            (self._num_terms,) = lengths or {1}
        most = self._gradients.placement.most
        numbers = torch.zeros(most, 1 + self._num_terms, dtype=torch.float64)
        for row, one in zip(numbers, counted, strict=False):
            if len(one) != len(row):
                raise TaskError(
                    f"loss_weights returned {len(one) - 1} weights: got {self._num_terms} before."
                )
            row[:] = torch.tensor(one, dtype=torch.float64)
        gathered = world.start_all_gather_to_host(numbers.to(world.device))().flatten(0, 1)
        num_samples, *weights = (math.fsum(column) for column in gathered.T.tolist())
        clock.lap(COMMUNICATION, begins=DATA)
        return int(num_samples), weights
