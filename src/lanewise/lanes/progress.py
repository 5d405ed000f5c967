"""Where in its run a step is, for code of the user's that depends on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class RunLength:
    """How many steps a run has, and whether the user's code asked for it."""

    num_steps: int | None = None
    """None where only the data tells, as of a stream that is read to its end."""
    is_asked: bool = False

    def ask(self) -> int | None:
        """Return the number of steps, and note that somebody asked."""
        self.is_asked = True
        return self.num_steps


class StepProgress(NamedTuple):
    """Where in the run a step is."""

    number: int
    """How many steps were taken before."""
    epoch: int
    """The index of its epoch."""
    length: RunLength
    """What `num_steps` is read from."""

    @property
    def num_steps(self) -> int | None:
        """How many steps the run has in all; None of a stream that ends with its data."""
        return self.length.ask()

    @property
    def fraction(self) -> float | None:
        """The part of the run that was trained before, from 0 to 1; None where `num_steps` is."""
        return self.number / self.num_steps if self.num_steps else None


PROGRESS: ContextVar[tuple[int, int, RunLength] | None] = ContextVar("progress", default=None)
"""The fields of the `StepProgress` of what runs now, in this thread; None outside of a run.

A plain tuple, as it is set for each lane. Whatever reads the batches of a run sets it with each of them, and
what runs elsewhere sets it there: a loader's process, the thread of a replica, or of autograd.
"""


@contextmanager
def own_progress() -> Iterator[None]:
    """Forget afterwards where in a run this block was, however it ends."""
    try:
        yield
    finally:
        PROGRESS.set(None)
