"""How many partial sums of gradients a process holds in `exact`, by formula; see `lanewise.lanes.TreeSum`."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple


class PendingSums(NamedTuple):
    """The most partial sums of any process, besides the gradient of the lane that runs."""

    before_last: int
    """While a lane runs that is not the process's last one."""
    at_last: int
    """While the last one runs."""
    left: int
    """After it: what the process sends."""


@lru_cache(maxsize=64)
def pending_sums(num_lanes: int, num_processes: int) -> PendingSums:
    """Count the partial sums of the process that has most of them."""
    before_last = at_last = left = 0
    for _, nodes in groupby(_nodes(num_lanes, num_processes), key=itemgetter(0)):
        *others, last = [size for _, size in nodes]
        for number, size in enumerate([*others, last]):
            if size > 1:
                before_last = max(before_last, number + _most_before_last(size))
        for number, size in enumerate(others):
            before_last = max(before_last, number + size.bit_length() - 1)
        at_last = max(at_last, len(others) + last.bit_length() - 1)
        left = max(left, len(others) + 1)
    return PendingSums(before_last, at_last, left)


def pending_before(lane: int, num_lanes: int) -> int:
    """Count the partial sums of one process before a lane runs."""
    count, start, stop = 0, 0, num_lanes
    while stop - start > 1:
        middle = start + (stop - start + 1) // 2
        if lane < middle:
            stop = middle
        else:
            count, start = count + 1, middle
    return count


def _most_before_last(size: int) -> int:
    """Return the most partial sums in a node of two lanes or more, while one but the last runs."""
    # All lanes of the left half are such; the right one begins with one sum, that of the left one.
    left, right = size - size // 2, size // 2
    return max(left.bit_length() - 1, 1 + _most_before_last(right) if right > 1 else 0)


def _nodes(num_lanes: int, num_processes: int) -> Iterator[tuple[int, int]]:
    """Yield the rank and the number of lanes of every largest node that one process has, in lane order."""
    size, num_larger = divmod(num_lanes, num_processes)
    border = num_larger * (size + 1)
    nodes = [(0, num_lanes)]
    while nodes:
        start, stop = nodes.pop()
        if start < border:
            rank = start // (size + 1)
            end = (rank + 1) * (size + 1)
        else:
            rank = num_larger + (start - border) // size
            end = border + (rank - num_larger + 1) * size
        if stop <= end:
            yield rank, stop - start
        else:
            middle = start + (stop - start + 1) // 2
            nodes += [(middle, stop), (start, middle)]
