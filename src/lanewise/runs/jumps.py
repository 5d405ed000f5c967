"""Finds where the loss of a run jumped, by the lines of metrics.jsonl."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, final

JUMP = "jump"
"""The event of a jump."""
_NUM_LINES, _LEAST_LINES = 50, 20
"""With how many lines before it a loss is compared, at most and at least."""
_DEVIATIONS, _TIMES, _PART = 10.0, 3.0, 0.1
"""How far a jump is above the median: so many median deviations, times what the highest of the lines is above
it, and at least this part of it. The noise of real losses, with batches from 8 samples, stays below."""


@final
class Jumps:
    """Compares the loss of each line with those before. Of several high ones in a row the first is a jump."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_NUM_LINES)
        self._is_high = False
        self.steps: list[int] = []
        """The step that had the largest loss, of each jump so far."""

    def note(self, columns: Mapping[str, Any]) -> None:
        """Take a line that is there already."""
        largest = columns.get("largest_loss")
        if columns.get("event") != JUMP:
            self.find(columns.get("train/loss"))
        elif isinstance(largest, dict) and type(largest.get("step")) is int:
            self.steps.append(largest["step"])

    def find(self, loss: object) -> float | None:
        """Take the loss of the next line; return the median before it if it is a jump."""
        if not isinstance(loss, float) or not math.isfinite(loss):
            return None
        was_high, self._is_high, middle = self._is_high, False, math.nan
        if len(self._losses) >= _LEAST_LINES:
            middle = median(self._losses)
            deviation = median(abs(before - middle) for before in self._losses)
            highest = max(self._losses) - middle
            least = max(_DEVIATIONS * deviation, _TIMES * highest, _PART * abs(middle))
            self._is_high = loss - middle > least
        self._losses.append(loss)
        return middle if self._is_high and not was_high else None
