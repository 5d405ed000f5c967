"""Splits the time of a step into phases, without waiting for the device."""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from lanewise.device.accelerator import Moment, has_streams, moment, seconds_between

PHASES = ("data", "forward", "backward", "communication", "optimizer")
"""What a step's time goes to; `communication` is what no computation hides."""

_MOST_LAPS = 1000
"""Of more laps, the older half is added up: a device has reached it by then, or has much to do still."""


class StepClock:
    """Attributes the time since the last lap to a phase; on a device with streams this is the device's time.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._now: Callable[[], Moment] = (
            partial(moment, device) if has_streams(device) else time.perf_counter
        )
        self.begin()

    def begin(self) -> None:
        """Begin the next lap now, and forget the time before."""
        self._seconds = dict.fromkeys(("", *PHASES), 0.0)
        self._laps: list[tuple[str, Moment]] = [("", self._now())]

    def skip(self) -> None:
        """Begin the next lap now: the time since the last one belongs to no phase."""
        if len(self._laps) > _MOST_LAPS:
            half = len(self._laps) // 2
            _add_up(self._laps[: half + 1], self._seconds)
            del self._laps[:half]
        self.lap("")

    def lap(self, phase: str) -> None:
        """End a stretch of a phase."""
        self._laps.append((phase, self._now()))

    def take(self) -> Callable[[], dict[str, float]]:
        """Begin anew.

        Returns:
            A function that returns the seconds of each phase since the last beginning, up to now; it waits
            for the device to get there.
        """
        laps, before = self._laps, self._seconds
        self.begin()

        def read() -> dict[str, float]:
            seconds = dict(before)
            _add_up(laps, seconds)
            return {phase: seconds[phase] for phase in PHASES}

        return read


def _add_up(laps: list[tuple[str, Moment]], seconds: dict[str, float]) -> None:
    for (_, start), (phase, end) in pairwise(laps):
        seconds[phase] += seconds_between(start, end)
