"""Splits the time of a step into phases, without waiting for the device."""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

PHASES = ("data", "forward", "backward", "communication", "optimizer")
"""What a step's time goes to; `communication` is what no computation hides."""


class StepClock:
    """Attributes the time since the last lap to a phase: the device's time on a GPU, else the host's.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Forget what was, so that the next lap begins now."""
        self._laps: list[tuple[str, float | torch.cuda.Event]] = [("", self._now())]

    def lap(self, phase: str) -> None:
        """End a stretch of a phase."""
        self._laps.append((phase, self._now()))

    def take(self) -> Callable[[], dict[str, float]]:
        """Restart.

        Returns:
            A function that returns the seconds of each phase up to now; on a GPU it waits for that point.
        """
        laps = self._laps
        self.restart()

        def read() -> dict[str, float]:
            seconds = dict.fromkeys(PHASES, 0.0)
            for (_, start), (phase, end) in pairwise(laps):
                seconds[phase] += _seconds_between(start, end)
            return seconds

        return read

    def _now(self) -> "float | torch.cuda.Event":
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds_between(start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
