"""The fixed tree: the same additions whoever carries the lanes."""

import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.lanes.placement import lane_ranges
from lanewise.lanes.tree import TreeSum, subtrees


def nest(left, right):
    """Instead of adding, remember what would have been added to what."""
    return (left, right)


def push_lanes(lanes, num_lanes: int, num_present: int, values=None, add=nest) -> TreeSum:
    tree_sum = TreeSum(num_lanes, num_present, add)
    for lane in lanes:
        if lane < num_present:
            tree_sum.push((lane, lane + 1), lane if values is None else values[lane])
    return tree_sum


def drawn_tree(start: int, stop: int, num_present: int):
    """The tree as the module describes it, from the root down."""
    if stop - start == 1:
        return start
    middle = start + math.ceil((stop - start) / 2)
    left = drawn_tree(start, middle, num_present)
    return left if middle >= num_present else (left, drawn_tree(middle, stop, num_present))


def test_six_lanes_as_drawn():
    assert push_lanes(range(6), 6, 6).root() == (((0, 1), 2), ((3, 4), 5))


def test_four_of_six_lanes_as_drawn():
    assert push_lanes(range(6), 6, 4).root() == (((0, 1), 2), 3)


def test_eight_lanes_are_a_balanced_tree():
    assert push_lanes(range(8), 8, 8).root() == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


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
    assert [list(subtrees(lanes, 6, 6)) for lanes in lane_ranges(6, world_size)] == drawn


def test_the_subtrees_of_four_of_six_lanes():
    assert [list(subtrees(lanes, 6, 4)) for lanes in lane_ranges(6, 2)] == [[(0, 3)], [(3, 4)]]
    assert [list(subtrees(lanes, 6, 4)) for lanes in lane_ranges(6, 3)] == [[(0, 2)], [(2, 3), (3, 4)], []]


@st.composite
def steps(draw):
    num_lanes = draw(st.integers(1, 70))
    return num_lanes, draw(st.integers(1, num_lanes)), draw(st.integers(1, num_lanes))


@settings(deadline=None)
@given(steps())
def test_any_number_of_processes_makes_the_tree_of_one(step):
    num_lanes, num_present, world_size = step
    expected = drawn_tree(0, num_lanes, num_present)
    assert push_lanes(range(num_lanes), num_lanes, num_present).root() == expected
    meeting = TreeSum(num_lanes, num_present, nest)
    for lanes in lane_ranges(num_lanes, world_size):
        pending = push_lanes(lanes, num_lanes, num_present).pending
        assert tuple(node for node, _ in pending) == subtrees(lanes, num_lanes, num_present)
        for node, value in pending:
            meeting.push(node, value)
    assert meeting.root() == expected


def leaves(tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for child in tree for leaf in leaves(child)]


@settings(deadline=None)
@given(steps())
def test_subtrees_cover_the_present_lanes_and_no_other(step):
    num_lanes, num_present, world_size = step
    for lanes in lane_ranges(num_lanes, world_size):
        pending = push_lanes(lanes, num_lanes, num_present).pending
        assert [leaf for _, tree in pending for leaf in leaves(tree)] == [x for x in lanes if x < num_present]
        for (start, stop), tree in pending:
            assert leaves(tree) == list(range(start, stop))


@settings(deadline=None)
@given(steps())
def test_few_partial_sums_are_held(step):
    num_lanes, num_present, world_size = step
    bound = math.ceil(math.log2(num_lanes)) + 1
    meeting = TreeSum(num_lanes, num_present, nest)
    for lanes in lane_ranges(num_lanes, world_size):
        own = TreeSum(num_lanes, num_present, nest)
        for lane in (x for x in lanes if x < num_present):
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
        assert subtrees(lanes, num_lanes, num_lanes) == ((lanes.start, lanes.stop),)


@given(st.integers(0, 4), st.integers(1, 9), st.data())
def test_a_power_of_two_of_processes_has_at_most_one_subtree_in_a_partial_step(exponent, lanes_each, data):
    world_size = 2**exponent
    num_lanes = world_size * lanes_each
    num_present = data.draw(st.integers(1, num_lanes))
    for lanes in lane_ranges(num_lanes, world_size):
        expected = ((lanes.start, min(lanes.stop, num_present)),) if lanes.start < num_present else ()
        assert subtrees(lanes, num_lanes, num_present) == expected


def add(left, right):
    return left + right


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_floats_are_added_in_the_order_of_the_tree(world_size):
    values = np.array([1e8, 1, -1e8, 1], dtype=np.float32)
    meeting = TreeSum(4, 4, add)
    for lanes in lane_ranges(4, world_size):
        for node, value in push_lanes(lanes, 4, 4, values, add).pending:
            meeting.push(node, value)
    assert meeting.root() == 0  # (1e8 + 1) + (-1e8 + 1): both ones are lost
    assert reduce(add, values) == 1  # ((1e8 + 1) - 1e8) + 1: only the first is


def test_an_absent_lane_is_not_a_zero():
    values = np.array([-0.0, -0.0, -0.0])
    assert np.signbit(push_lanes(range(4), 4, 3, values, add).root())


def test_there_is_no_root_before_all_present_lanes_were_pushed():
    with pytest.raises(AssertionError, match=r"only \[\(0, 3\), \(3, 5\)\]"):
        push_lanes(range(5), 6, 6).root()
