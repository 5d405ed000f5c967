"""Splits the time of a step into phases, without waiting for the device."""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import final

import torch

from lanewise.device.accelerator import Moment, has_streams, moment, seconds_between
from lanewise.watch.heartbeat import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, heartbeat

PHASES = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
"""The phases of a step; `communication` is the time of communication that no computation overlaps."""

_MOST_LAPS = 1000
"""The most laps to keep: of more, the older half is added up, which a device has mostly completed by then."""


@final
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
        self._laps.append(("", self._now()))

    def lap(self, phase: str, begins: str) -> None:
        """Attribute the time since the last lap to a phase, and note which one begins."""
        self._laps.append((phase, self._now()))
        _, step, lane = heartbeat.note
        heartbeat.note = (begins, step, lane)

    def take(self) -> Callable[[], dict[str, float]]:
        """Begin a new measurement, and return the reader of the one that ends now.

        Returns:
            A function that waits for the device to reach this moment, and then returns the seconds of each
            phase from the previous beginning until now.
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
