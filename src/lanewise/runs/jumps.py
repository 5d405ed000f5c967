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


@final
class Jumps:
    """Compares the loss of each line with those before.

    A jump is above their median by ten times the median distance from it, by four times what the highest of
    their second half is above it, and by a tenth. The noise of real losses stays below, also of batches of
    8 samples. Of several high lines in a row the first is a jump.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_NUM_LINES)
        self._is_high = False
        self.steps: list[int] = []
        """The step that had the largest loss, of each jump so far."""

    def find(self, columns: Mapping[str, Any]) -> float | None:
        """Take the next line; return the median of the losses before it if its own is a jump."""
        loss, largest = columns.get("train/loss"), columns.get("largest_loss")
        if not isinstance(loss, float) or not math.isfinite(loss) or not isinstance(largest, dict):
            return None
        was_high, self._is_high, middle = self._is_high, False, math.nan
        if len(self._losses) >= _LEAST_LINES:
            middle = median(self._losses)
            deviation = median(abs(before - middle) for before in self._losses)
            highest = max(list(self._losses)[-_NUM_LINES // 2 :]) - middle
            self._is_high = loss - middle > max(10.0 * deviation, 4.0 * highest, 0.1 * abs(middle))
        self._losses.append(loss)
        if was_high or not self._is_high:
            return None
        self.steps.append(largest["step"])
        return middle
