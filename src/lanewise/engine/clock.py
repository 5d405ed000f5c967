"""Splits the time of a step into phases, without waiting for the device."""

from collections.abc import Callable
from itertools import pairwise

import torch

from lanewise.world.accelerator import Moment, moment, seconds_between

PHASES = ("data", "forward", "backward", "communication", "optimizer")
"""What a step's time goes to; `communication` is what no computation hides."""


class StepClock:
    """Attributes the time since the last lap to a phase; on a device with streams this is the device's time.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Begin the next lap now, and forget the time before."""
        self._laps: list[tuple[str, Moment]] = [("", moment(self._device))]

    def lap(self, phase: str) -> None:
        """End a stretch of a phase."""
        self._laps.append((phase, moment(self._device)))

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
