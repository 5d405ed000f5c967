"""The steps between two lines of metrics: which step ends an interval, and the sums over its steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lanewise.engine.step.message import StepTotals


@dataclass(frozen=True)
class IntervalTotals:
    """Totals over the steps of an interval."""

    num_steps: int
    loss: float
    """Sum of all losses divided by the sum of all weights; NaN where that sum is 0."""
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
        """Return the totals, and begin the next interval."""
        loss = self._loss_sum / self._weight if self._weight else math.nan
        totals = IntervalTotals(self._num_steps, loss, self._weight / self._num_steps)
        self._begin()
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Return the sums for a checkpoint, so that a run that resumes from it writes the same line."""
        return {"num_steps": self._num_steps, "loss_sum": self._loss_sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums.

        Raises:
            ValueError: if `state` is not what `state_dict` returns.
        """
        num_steps, loss_sum, weight = state["num_steps"], state["loss_sum"], state["weight"]
        types = [type(num_steps), type(loss_sum), type(weight)]
        if len(state) > 3 or types != [int, float, float] or num_steps < 0 or not weight >= 0:
            raise ValueError(f"not a state of the steps since the last line of metrics: {state!r:.100}")
        self._num_steps, self._loss_sum, self._weight = num_steps, loss_sum, weight

    def _begin(self) -> None:
        self._num_steps = 0
        self._loss_sum = 0.0
        self._weight = 0.0
