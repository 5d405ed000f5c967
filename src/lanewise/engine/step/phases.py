"""What a process does now, for its heartbeat, and how long each phase of its steps takes."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import final

import torch

from lanewise.processes.device.accelerator import Moment, has_passed, has_streams, moment, seconds_between
from lanewise.processes.watch.heartbeat import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, heartbeat

PHASES = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
"""The phases of a step; `communication` is the time of communication that no computation overlaps."""

_MOST_LAPS = 1000
"""The most laps to keep: of more, those of the steps that the device has completed are added up."""


@dataclass(frozen=True)
class StepTimes:
    """What a process spent its time on in some steps, in seconds."""

    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """The time of each phase, over all the steps."""
    steps: list[float] = field(default_factory=list)
    """The time of each step."""

    def percentile(self, percent: int) -> float:
        """Return the time that so many steps of a hundred do not exceed; NaN where there is no step."""
        ordered = sorted(self.steps)
        return ordered[math.ceil(percent * len(ordered) / 100) - 1] if ordered else math.nan


@final
class Phases:
    """Notes which phase of a step begins, and how long each takes, without waiting for the device.

    On a device with streams this is the device's time.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._now: Callable[[], Moment] = (
            partial(moment, device) if has_streams(device) else time.perf_counter
        )
        self._computed: list[float] = []
        """The seconds of each step, but for its communication."""
        self.forget()

    def forget(self) -> None:
        """Begin to measure now, and forget the time before."""
        self._times = StepTimes()
        self._phase = ""
        self._laps: list[tuple[str, Moment]] = [("", self._now())]
        """The end of each phase, with its name."""

    def begin(self, phase: str, step: int, lane: int | None = None) -> None:
        """Begin a phase, and end the one before; what is none of `PHASES` lies between two steps."""
        if len(self._laps) > _MOST_LAPS and self._phase not in PHASES:
            self._add_up_completed()
        self._laps.append((self._phase, self._now()))
        self._phase = phase
        heartbeat.note = phase, step, lane

    def begin_sending(self) -> None:
        """Note within a backward that gradients begin to travel: the rest of it waits for them, or computes.

        Which of both is known with the next gradients, or with the end of the backward.
        """
        self._phase = BACKWARD
        _, step, lane = heartbeat.note
        assert step is not None, "a backward is of a step"
        self.begin(COMMUNICATION, step, lane)

    def take(self) -> Callable[[], StepTimes]:
        """Begin a new measurement after a step, and return the reader of the one that ends now.

        Returns:
            A function that waits for the device to reach this moment, and then returns the times from the
            previous beginning until now.
        """
        laps, times = self._laps, self._times
        self._computed.clear()
        self.forget()

        def read() -> StepTimes:
            self._add_up(laps, times)
            laps.clear()
            return times

        return read

    def computed_seconds(self) -> float:
        """Return the mean time of a step without its communication, which other processes may make longer.

        It is the mean over the steps which the device has completed and which were not read before the last
        `take`; NaN if there is none. Does not wait.
        """
        self._add_up_completed()
        return fmean(self._computed) if self._computed else math.nan

    def _add_up_completed(self) -> None:
        """Add up the steps that the device has completed, so that they take no memory."""
        laps = self._laps
        for number in range(len(laps) - 1, 0, -1):
            phase, begin = laps[number]
            if phase not in PHASES and has_passed(begin):  # of a step; so those before have ended
                self._add_up(laps[: number + 1], self._times)
                del laps[:number]
                return

    def _add_up(self, laps: list[tuple[str, Moment]], times: StepTimes) -> None:
        """Add the laps of whole steps."""
        step = computed = 0.0
        phases = times.phases
        for (_, start), (phase, end) in pairwise([*laps, ("", 0.0)]):
            if phase in phases:
                seconds = seconds_between(start, end)
                phases[phase] += seconds
                step += seconds
                if phase != COMMUNICATION:
                    computed += seconds
            elif step:
                times.steps.append(step)
                self._computed.append(computed)
                step = computed = 0.0
