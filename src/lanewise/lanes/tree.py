"""The one fixed binary tree in which the lanes' values are added in `exact`, whoever carries the lanes.

A node is a range of lanes [start, stop). The root holds all lanes; a node of n lanes splits into its first
ceil(n / 2) lanes and the rest. Six lanes:

    0   1   2   3   4   5
    |   |   |   |   |   |
    +-+-+   |   +-+-+   |         [0,2) = 0 + 1            [3,5) = 3 + 4
      +--+--+     +--+--+         [0,3) = [0,2) + 2        [3,6) = [3,5) + 5
         +-----+-----+            [0,6) = [0,3) + [3,6)

A lane without samples is absent, never a zero, since -0.0 + 0.0 is not -0.0: its parent is then the other
child. With a `Schedule` lanes are absent from the end on; with a stream any lanes may be. With the first four
of the six lanes present the tree is

    0   1   2   3
    +-+-+   |   |                 [0,2) = 0 + 1
      +--+--+   |                 [0,3) = [0,2) + 2
         +---+--+                 [0,4) = [0,3) + 3

A process adds what it can of its own range of lanes. What remains are the largest nodes inside the range, its
`subtrees`, and they travel. Six lanes on 2, 3 and 4 processes:

    2    [0,3)        [3,6)
    3    [0,2)        [2,3) [3,4)       [4,5) [5,6)
    4    [0,2)        [2,3) [3,4)       [4,5)           [5,6)

Halving makes every range of a power-of-two number of processes a single subtree whenever it divides the
lanes, for any number of lanes each.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeAlias, TypeVar, final

Present: TypeAlias = range | tuple[int, ...]
"""The lanes that have samples in a step, in order; a range where they are the first ones."""

Node = tuple[int, int]
"""Lanes [start, stop) whose values have been added."""

T = TypeVar("T")


@final
class TreeSum(Generic[T]):
    """Adds nodes in the order of the tree, as far as the nodes it was given allow.

    Nodes are pushed in lane order. Two of them are added as soon as they are the two children of one node, so
    that at most ceil(log2(num_lanes)) + 1 partial sums are held.

    Args:
        num_lanes: lanes of the run.
        present: lanes that have samples in this step.
        add: returns the sum of a left and a right value; may reuse the storage of either.
    """

    def __init__(self, num_lanes: int, present: Present, add: Callable[[T, T], T]) -> None:
        self._left_siblings = _left_siblings(num_lanes, present)
        self._add = add
        self.pending: list[tuple[Node, T]] = []
        """The sums so far, in lane order; a single root once every present lane was pushed."""

    def push(self, node: Node, value: T) -> None:
        """Add a value to the tree, to the right of those that were pushed before."""
        while self.pending and self.pending[-1][0] == self._left_siblings.get(node):
            left, left_value = self.pending.pop()
            node, value = (left[0], node[1]), self._add(left_value, value)
        self.pending.append((node, value))

    def root(self) -> T:
        """Return the sum over all lanes, which must have been pushed."""
        assert len(self.pending) == 1, f"no root yet, only {[node for node, _ in self.pending]}"
        return self.pending[0][1]


@lru_cache(maxsize=256)
def subtrees(lanes: range, num_lanes: int, present: Present) -> tuple[Node, ...]:
    """Return the nodes that remain when a process has added what it can of these lanes, in lane order."""
    tree_sum: TreeSum[None] = TreeSum(num_lanes, present, lambda _left, _right: None)
    for lane in lanes:
        if lane in present:
            tree_sum.push((lane, lane + 1), None)
    return tuple(node for node, _ in tree_sum.pending)


@lru_cache(maxsize=64)
def _left_siblings(num_lanes: int, present: Present) -> dict[Node, Node]:
    """Map each right child to its left sibling, for the tree without the absent lanes."""
    siblings: dict[Node, Node] = {}

    def visit(start: int, stop: int) -> Node | None:
        """Return what is left of a node: its present lanes from the first to the last; None without any."""
        if stop - start == 1:
            return (start, stop) if start in present else None
        middle = start + (stop - start + 1) // 2
        left, right = visit(start, middle), visit(middle, stop)
        if left is None or right is None:  # the parent is the other child
            return left or right
        siblings[right] = left
        return left[0], right[1]

    visit(0, num_lanes)
    return siblings
