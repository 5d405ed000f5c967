"""The steps between two lines of metrics: which step ends them, and what they add up to."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lanewise.engine.step.message import StepTotals


@dataclass(frozen=True)
class IntervalTotals:
    """What the steps of an interval say together."""

    num_steps: int
    loss: float
    """Sum of all losses by the sum of all weights; NaN where that is 0."""
    mean_weight: float
    """Mean weight of a step."""


class LogInterval:
    """The steps since the last line of metrics, the same on every rank.

    A line is written after the first step, after each multiple of `every_steps` and after the last step.

    Args:
        every_steps: steps from one line to the next.
        last_step: the step before which training ends.
    """

    def __init__(self, every_steps: int, last_step: int) -> None:
        self._every_steps = every_steps
        self._last_step = last_step
        self._begin()

    def ends_with(self, step: int) -> bool:
        """Tell whether a line is written after a step."""
        return step % self._every_steps == 0 or step + 1 == self._last_step

    def add(self, totals: StepTotals) -> None:
        """Add a step."""
        self._num_steps += 1
        self._loss_sum += totals.loss_sum
        self._weight += totals.weight

    def take(self) -> IntervalTotals:
        """Return what was added up, and begin the next interval."""
        loss = self._loss_sum / self._weight if self._weight else math.nan
        totals = IntervalTotals(self._num_steps, loss, self._weight / self._num_steps)
        self._begin()
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the run that goes on from it writes the same line."""
        return {"num_steps": self._num_steps, "loss_sum": self._loss_sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: if it is none.
        """
        num_steps, loss_sum, weight = state["num_steps"], state["loss_sum"], state["weight"]
        types = [type(num_steps), type(loss_sum), type(weight)]
        if len(state) > 3 or types != [int, float, float] or num_steps < 0 or not weight >= 0:
            raise ValueError(f"the steps since the last line of metrics have no state {state!r:.100}")
        self._num_steps, self._loss_sum, self._weight = num_steps, loss_sum, weight

    def _begin(self) -> None:
        self._num_steps = 0
        self._loss_sum = 0.0
        self._weight = 0.0
