from hypothesis import example, given
from hypothesis import strategies as st

from lanewise.commands.plan.pending import PendingSums, pending_counts, pending_sums
from lanewise.lanes import lane_ranges


def count_nodes(lanes, start, stop):
    """Count the largest nodes inside a range of lanes, of those that the node [start, stop) consists of."""
    if lanes.start <= start and stop <= lanes.stop:
        return 1
    if stop <= lanes.start or lanes.stop <= start:
        return 0
    middle = start + (stop - start + 1) // 2
    return count_nodes(lanes, start, middle) + count_nodes(lanes, middle, stop)


@given(st.integers(1, 200), st.integers(1, 200))
@example(132, 10)  # where a process has most sums while a lane runs that is not its last one
def test_as_many_sums_are_pending_as_the_tree_has(num_lanes, most_processes):
    num_processes = min(num_lanes, most_processes)
    before_last = at_last = left = 0
    for lanes in lane_ranges(num_lanes, num_processes):
        for lane in lanes:
            count = count_nodes(range(lanes.start, lane), 0, num_lanes) if lane > lanes.start else 0
            if lane == lanes[-1]:
                at_last = max(at_last, count)
            else:
                before_last = max(before_last, count)
        left = max(left, count_nodes(lanes, 0, num_lanes))
    assert pending_sums(num_lanes, num_processes) == PendingSums(before_last, at_last, left)


@given(st.integers(1, 200))
def test_as_many_are_there_before_each_lane_of_one_process(num_lanes):
    counts = [count_nodes(range(lane), 0, num_lanes) for lane in range(1, num_lanes + 1)]
    assert pending_counts(range(num_lanes), num_lanes) == [0, *counts]
