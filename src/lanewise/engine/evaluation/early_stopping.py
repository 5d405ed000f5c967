"""Ends a run before its last step when its evaluations no longer improve."""

import math
from collections.abc import Mapping
from typing import Any

from lanewise.config import EarlyStoppingConfig


class EarlyStopping:
    """Counts the evaluations since the best one. All ranks get the same values, so they count alike.

    Args:
        config: which metric to follow, and after how many evaluations without improvement to stop.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self._sign = 1 if config.mode == "max" else -1
        self._best = -math.inf
        self._num_without = 0

    @property
    def is_over(self) -> bool:
        """Whether the run must end."""
        return self._num_without >= self.config.patience

    def note(self, value: float) -> None:
        """Record the value of an evaluation. NaN is never an improvement."""
        if self._sign * value > self._best + self.config.min_delta:
            self._best, self._num_without = float(self._sign * value), 0
        else:
            self._num_without += 1

    def describe(self) -> str:
        """Return why the run ends."""
        best = "nothing but NaN" if self._best == -math.inf else f"{self._sign * self._best:g}"
        delta = f" by more than {self.config.min_delta:g}" if self.config.min_delta else ""
        return (
            f"early stopping: {self._num_without} evaluations found no {self.config.metric} better than "
            f"{best}{delta}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        followed = {"metric": self.config.metric, "mode": self.config.mode}
        return {**followed, "best": self._best, "num_without": self._num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; start from the beginning if it is of another metric or another mode.

        Raises:
            ValueError: if `state` is not what `state_dict` returns.
        """
        best, num_without = state["best"], state["num_without"]
        if len(state) > 4 or not isinstance(best, float) or type(num_without) is not int or num_without < 0:
            raise ValueError(f"not a state of early stopping: {state!r:.100}")
        is_same = (state["metric"], state["mode"]) == (self.config.metric, self.config.mode)
        self._best = best if is_same and not math.isnan(best) else -math.inf
        self._num_without = num_without if is_same else 0
