"""How many partial sums of gradients a process holds in `exact`, counted in the tree of `lanewise.lanes`."""

from functools import lru_cache
from typing import NamedTuple

from lanewise.lanes import TreeSum, lane_ranges


class PendingSums(NamedTuple):
    """The most partial sums of any process, besides the gradient of the lane that runs."""

    before_last: int
    """The most while a lane runs that is not the process's last one."""
    at_last: int
    """The most while the last lane runs."""
    left: int
    """The most after the last lane: the process sends them."""


@lru_cache(maxsize=64)
def pending_sums(num_lanes: int, num_processes: int) -> PendingSums:
    """Count the partial sums of the process that has most of them."""
    before_last = at_last = left = 0
    for lanes in lane_ranges(num_lanes, num_processes):
        *before, last, after = pending_counts(lanes, num_lanes)
        before_last = max([before_last, *before])
        at_last, left = max(at_last, last), max(left, after)
    return PendingSums(before_last, at_last, left)


def pending_counts(lanes: range, num_lanes: int) -> list[int]:
    """Count the partial sums of a process before each of its lanes, and after the last one."""
    tree_sum: TreeSum[None] = TreeSum(num_lanes, range(num_lanes), lambda _left, _right: None)
    counts = [0]
    for lane in lanes:
        tree_sum.push((lane, lane + 1), None)
        counts.append(len(tree_sum.pending))
    return counts
