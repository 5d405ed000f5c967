"""The fixed tree: the same additions whoever carries the lanes."""

import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.lanes import TreeSum, lane_ranges
from lanewise.lanes.tree import subtrees


def nest(left, right):
    """Instead of adding, remember what would have been added to what."""
    return (left, right)


def push_lanes(lanes, num_lanes: int, present, values=None, add=nest) -> TreeSum:
    tree_sum = TreeSum(num_lanes, present, add)
    for lane in lanes:
        if lane in present:
            tree_sum.push((lane, lane + 1), lane if values is None else values[lane])
    return tree_sum


def drawn_tree(start: int, stop: int, present):
    """The tree as the module describes it, from the root down; None where all lanes are absent."""
    if stop - start == 1:
        return start if start in present else None
    middle = start + math.ceil((stop - start) / 2)
    left, right = drawn_tree(start, middle, present), drawn_tree(middle, stop, present)
    if left is None or right is None:
        return right if left is None else left
    return left, right


def test_six_lanes_as_drawn():
    assert push_lanes(range(6), 6, range(6)).root() == (((0, 1), 2), ((3, 4), 5))


def test_four_of_six_lanes_as_drawn():
    assert push_lanes(range(6), 6, range(4)).root() == (((0, 1), 2), 3)


def test_any_lanes_may_be_absent():
    assert push_lanes(range(6), 6, (1, 3, 5)).root() == (1, (3, 5))
    assert [list(subtrees(lanes, 6, (1, 3, 5))) for lanes in lane_ranges(6, 2)] == [[(1, 2)], [(3, 6)]]


def test_eight_lanes_are_a_balanced_tree():
    assert push_lanes(range(8), 8, range(8)).root() == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


@pytest.mark.parametrize(
    ("world_size", "drawn"),
    [
        (1, [[(0, 6)]]),
        (2, [[(0, 3)], [(3, 6)]]),
        (3, [[(0, 2)], [(2, 3), (3, 4)], [(4, 5), (5, 6)]]),
        (4, [[(0, 2)], [(2, 3), (3, 4)], [(4, 5)], [(5, 6)]]),
        (6, [[(0, 1)], [(1, 2)], [(2, 3)], [(3, 4)], [(4, 5)], [(5, 6)]]),
    ],
)
def test_the_subtrees_of_six_lanes_as_drawn(world_size, drawn):
    assert [list(subtrees(lanes, 6, range(6))) for lanes in lane_ranges(6, world_size)] == drawn


def test_the_subtrees_of_four_of_six_lanes():
    assert [list(subtrees(lanes, 6, range(4))) for lanes in lane_ranges(6, 2)] == [[(0, 3)], [(3, 4)]]
    assert [list(subtrees(lanes, 6, range(4))) for lanes in lane_ranges(6, 3)] == [
        [(0, 2)],
        [(2, 3), (3, 4)],
        [],
    ]


@st.composite
def steps(draw):
    num_lanes = draw(st.integers(1, 70))
    first = st.integers(1, num_lanes).map(range)  # as with a schedule
    some = st.sets(st.integers(0, num_lanes - 1), min_size=1).map(lambda lanes: tuple(sorted(lanes)))
    return num_lanes, draw(first | some), draw(st.integers(1, num_lanes))


@settings(deadline=None)
@given(steps())
def test_any_number_of_processes_makes_the_tree_of_one(step):
    num_lanes, present, world_size = step
    expected = drawn_tree(0, num_lanes, present)
    assert push_lanes(range(num_lanes), num_lanes, present).root() == expected
    meeting = TreeSum(num_lanes, present, nest)
    for lanes in lane_ranges(num_lanes, world_size):
        pending = push_lanes(lanes, num_lanes, present).pending
        assert tuple(node for node, _ in pending) == subtrees(lanes, num_lanes, present)
        for node, value in pending:
            meeting.push(node, value)
    assert meeting.root() == expected


def leaves(tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for child in tree for leaf in leaves(child)]


@settings(deadline=None)
@given(steps())
def test_subtrees_cover_the_present_lanes_and_no_other(step):
    num_lanes, present, world_size = step
    for lanes in lane_ranges(num_lanes, world_size):
        pending = push_lanes(lanes, num_lanes, present).pending
        assert [leaf for _, tree in pending for leaf in leaves(tree)] == [x for x in lanes if x in present]
        for (start, stop), tree in pending:
            assert leaves(tree) == [lane for lane in range(start, stop) if lane in present]


@settings(deadline=None)
@given(steps())
def test_few_partial_sums_are_held(step):
    num_lanes, present, world_size = step
    bound = math.ceil(math.log2(num_lanes)) + 1
    meeting = TreeSum(num_lanes, present, nest)
    for lanes in lane_ranges(num_lanes, world_size):
        own = TreeSum(num_lanes, present, nest)
        for lane in (x for x in lanes if x in present):
            own.push((lane, lane + 1), lane)
            assert len(own.pending) <= bound
        for node, value in own.pending:
            meeting.push(node, value)
            assert len(meeting.pending) <= bound


@given(st.integers(0, 5), st.integers(1, 9))
def test_a_power_of_two_of_processes_has_one_subtree_each(exponent, lanes_each):
    world_size = 2**exponent
    num_lanes = world_size * lanes_each
    for lanes in lane_ranges(num_lanes, world_size):
        assert subtrees(lanes, num_lanes, range(num_lanes)) == ((lanes.start, lanes.stop),)


@given(st.integers(0, 4), st.integers(1, 9), st.data())
def test_a_power_of_two_of_processes_has_at_most_one_subtree_in_a_partial_step(exponent, lanes_each, data):
    world_size = 2**exponent
    num_lanes = world_size * lanes_each
    num_present = data.draw(st.integers(1, num_lanes))
    for lanes in lane_ranges(num_lanes, world_size):
        expected = ((lanes.start, min(lanes.stop, num_present)),) if lanes.start < num_present else ()
        assert subtrees(lanes, num_lanes, range(num_present)) == expected


def add(left, right):
    return left + right


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_floats_are_added_in_the_order_of_the_tree(world_size):
    values = np.array([1e8, 1, -1e8, 1], dtype=np.float32)
    meeting = TreeSum(4, range(4), add)
    for lanes in lane_ranges(4, world_size):
        for node, value in push_lanes(lanes, 4, range(4), values, add).pending:
            meeting.push(node, value)
    assert meeting.root() == 0  # (1e8 + 1) + (-1e8 + 1): both ones are lost
    assert reduce(add, values) == 1  # ((1e8 + 1) - 1e8) + 1: only the first is


def test_an_absent_lane_is_not_a_zero():
    values = np.array([-0.0, -0.0, -0.0])
    assert np.signbit(push_lanes(range(4), 4, range(3), values, add).root())


def test_there_is_no_root_before_all_present_lanes_were_pushed():
    with pytest.raises(AssertionError, match=r"only \[\(0, 3\), \(3, 5\)\]"):
        push_lanes(range(5), 6, range(6)).root()
