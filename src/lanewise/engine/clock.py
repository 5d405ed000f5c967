"""Splits the time of a step into phases, without waiting for the device."""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from lanewise.world.accelerator import Moment, has_streams, moment, seconds_between

PHASES = ("data", "forward", "backward", "communication", "optimizer")
"""What a step's time goes to; `communication` is what no computation hides."""


class StepClock:
    """Attributes the time since the last lap to a phase; on a device with streams this is the device's time.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._now: Callable[[], Moment] = (
            partial(moment, device) if has_streams(device) else time.perf_counter
        )
        self.restart()

    def restart(self) -> None:
        """Begin the next lap now, and forget the time before."""
        self._laps: list[tuple[str, Moment]] = [("", self._now())]

    def lap(self, phase: str) -> None:
        """End a stretch of a phase."""
        self._laps.append((phase, self._now()))

    def take(self) -> Callable[[], dict[str, float]]:
        """Restart.

        Returns:
            A function that returns the seconds of each phase up to now; it waits for the device to get there.
        """
        laps = self._laps
        self.restart()

        def read() -> dict[str, float]:
            seconds = dict.fromkeys(PHASES, 0.0)
            for (_, start), (phase, end) in pairwise(laps):
                seconds[phase] += seconds_between(start, end)
            return seconds

        return read
