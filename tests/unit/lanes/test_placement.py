"""Each process carries one contiguous range of lanes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.lanes import Placement, lane_ranges

EIGHT_LANES = {
    1: "[0 1 2 3 4 5 6 7]",
    2: "[0 1 2 3] [4 5 6 7]",
    3: "[0 1 2] [3 4 5] [6 7]",
    5: "[0 1] [2 3] [4 5] [6] [7]",
    8: "[0] [1] [2] [3] [4] [5] [6] [7]",
}


def draw(ranges) -> str:
    return " ".join(f"[{' '.join(map(str, lanes))}]" for lanes in ranges)


@pytest.mark.parametrize("world_size", EIGHT_LANES)
def test_eight_lanes_as_drawn(world_size):
    assert draw(lane_ranges(8, world_size)) == EIGHT_LANES[world_size]


@pytest.mark.parametrize("world_size", EIGHT_LANES)
def test_the_docstring_shows_the_same_pictures(world_size):
    assert f"        {world_size}    {EIGHT_LANES[world_size]}\n" in lane_ranges.__doc__


@given(st.data(), st.integers(1, 300))
def test_ranges_are_contiguous_complete_and_nearly_equal(data, num_lanes):
    world_size = data.draw(st.integers(1, num_lanes))
    ranges = lane_ranges(num_lanes, world_size)
    assert len(ranges) == world_size
    assert [lane for lanes in ranges for lane in lanes] == list(range(num_lanes))
    assert all(left.stop == right.start for left, right in pairwise(ranges))
    sizes = [len(lanes) for lanes in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("num_lanes", "world_size"), [(8, 9), (8, 0), (8, -1), (1, 2), (0, 1), (0, 0)])
def test_a_process_without_a_lane_is_refused(num_lanes, world_size):
    with pytest.raises(ValueError, match=rf"got {world_size} processes for {num_lanes} lanes\. Use 1 to"):
        lane_ranges(num_lanes, world_size)


@given(st.data(), st.integers(1, 60))
def test_a_placement_says_of_each_rank_what_its_lanes_have(data, num_lanes):
    world_size = data.draw(st.integers(1, num_lanes))
    rank = data.draw(st.integers(0, world_size - 1))
    present = data.draw(st.sets(st.integers(0, num_lanes - 1), min_size=1).map(sorted).map(tuple))
    placement = Placement(lane_ranges(num_lanes, world_size), rank)
    assert placement.num_lanes == num_lanes
    assert placement.own == placement.ranges[rank]
    assert placement.most == max(len(lanes) for lanes in placement.ranges)
    counts = placement.counts(present)
    assert counts == [sum(lane in present for lane in lanes) for lanes in placement.ranges]
    covered = [
        [lane for start, stop in nodes for lane in range(start, stop) if lane in present]
        for nodes in placement.subtrees(present)
    ]
    assert list(map(len, covered)) == counts
    assert [lane for lanes in covered for lane in lanes] == list(present)
