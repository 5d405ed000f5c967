"""How slow this machine is, for limits that tests wait for or give to a run."""

import os
import time

_VARIABLE = "LANEWISE_TESTS_SLOWNESS"
_QUICK_SECONDS = 0.006
"""What the work that is measured takes on the machine whose seconds tests name."""


def measure_speed() -> float:
    """Return how many seconds this process needs for a little work, beside whatever runs now."""
    begin = time.perf_counter()
    for _ in range(20):
        sum(number * number for number in range(10_000))
    return time.perf_counter() - begin


def _measure_slowness() -> int:
    """Return how many times slower this machine is, at least once, measured by the first process for all."""
    if _VARIABLE not in os.environ:
        slowness = max(measure_speed() for _ in range(5)) / _QUICK_SECONDS
        os.environ[_VARIABLE] = str(max(1, round(slowness)))
    return int(os.environ[_VARIABLE])


SLOWNESS = _measure_slowness()


def patient(seconds: float) -> float:
    """Return a limit for this machine, of what it is on a quick one."""
    return seconds * SLOWNESS
