"""Measures several modes in turns: what slows the machine down for a while slows all of them down."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from statistics import quantiles
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class MiddleHalf(NamedTuple):
    """The median of some values, and the bounds of the half of them around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "MiddleHalf":
        """Return that of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*quantiles(values, n=4, method="inclusive"))

    @property
    def width(self) -> float:
        """The distance from low to high, as a part of the median."""
        return (self.high - self.low) / self.median


def take_turns(turns: Mapping[K, Callable[[], T]]) -> Iterator[dict[K, T]]:
    """Yield rounds without end, in each of which every mode trains one turn: A B C A B C.

    Args:
        turns: of each mode: lets it train a turn, and returns what came of it.
    """
    while True:
        yield {name: take_turn() for name, take_turn in turns.items()}


def rate(per_second: float) -> str:
    """Write how much is done in a second."""
    if per_second >= 1e6:
        return f"{per_second / 1e6:,.4g}M"
    return f"{per_second:{',.0f' if per_second >= 1000 else ',.4g'}}"
