"""Which process carries which lanes."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol, final

from lanewise.errors import ConfigError
from lanewise.lanes.tree import Node, Present, subtrees


class Ranked(Protocol):
    """A process among others."""

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        ...


@final
@dataclass(frozen=True)
class Placement:
    """Who carries which lanes. It is made once for a run, and passed to whatever needs to know it."""

    ranges: tuple[range, ...]
    """The lanes of each rank, in rank order."""
    rank: int
    """The number of this process."""

    @classmethod
    def of(cls, num_lanes: int, process: Ranked) -> "Placement":
        """Place the lanes of a run by `lane_ranges`, as one of its processes sees it."""
        return cls(lane_ranges(num_lanes, process.world_size), process.rank)

    @cached_property
    def num_lanes(self) -> int:
        """Lanes of the run."""
        return self.ranges[-1].stop

    @property
    def own(self) -> range:
        """The lanes of this process."""
        return self.ranges[self.rank]

    @cached_property
    def most(self) -> int:
        """The most lanes that a process carries."""
        return max(map(len, self.ranges))

    def present(self, present: Present) -> list[list[int]]:
        """Return which of the present lanes of a step each rank carries."""
        return [[lane for lane in lanes if lane in present] for lanes in self.ranges]

    def counts(self, present: Present) -> list[int]:
        """Return how many lanes each rank has in a step."""
        return list(map(len, self.present(present)))

    def subtrees(self, present: Present) -> list[tuple[Node, ...]]:
        """Return the nodes that each rank is left with in a step when it has added up its lanes."""
        return [subtrees(lanes, self.num_lanes, present) for lanes in self.ranges]


def lane_ranges(num_lanes: int, world_size: int) -> tuple[range, ...]:
    """Give each process a contiguous range of lanes; the first ones carry one more where it doesn't divide.

    Eight lanes on 1, 2, 3, 5 and 8 processes:

        1    [0 1 2 3 4 5 6 7]
        2    [0 1 2 3] [4 5 6 7]
        3    [0 1 2] [3 4 5] [6 7]
        5    [0 1] [2 3] [4 5] [6] [7]
        8    [0] [1] [2] [3] [4] [5] [6] [7]

    Args:
        num_lanes: lanes of the run.
        world_size: processes of the run, from 1 to `num_lanes`.

    Returns:
        One range of lanes for each rank, in rank order.

    Raises:
        ConfigError: if some process would have no lane, or there is no process.
    """
    if not 1 <= world_size <= num_lanes:
        raise ConfigError(
            f"every process needs at least one lane: got {world_size} processes for {num_lanes} lanes. "
            f"Use 1 to {num_lanes} processes, or a smaller micro_batch_size."
        )
    size, larger = divmod(num_lanes, world_size)
    starts = [rank * size + min(rank, larger) for rank in range(world_size + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))
