from hypothesis import example, given
from hypothesis import strategies as st

from lanewise.lanes import TreeSum, lane_ranges
from lanewise.plan.pending import PendingSums, pending_before, pending_sums


@given(st.integers(1, 200), st.integers(1, 200))
@example(132, 10)  # where a process has most sums while a lane runs that is not its last one
def test_as_many_sums_are_pending_as_the_tree_has(num_lanes, most_processes):
    num_processes = min(num_lanes, most_processes)
    before_last = at_last = left = 0
    for lanes in lane_ranges(num_lanes, num_processes):
        tree_sum = TreeSum(num_lanes, num_lanes, lambda _left, _right: None)
        for lane in lanes:
            count = len(tree_sum.pending)
            if lane == lanes[-1]:
                at_last = max(at_last, count)
            else:
                before_last = max(before_last, count)
            tree_sum.push((lane, lane + 1), None)
        left = max(left, len(tree_sum.pending))
    assert pending_sums(num_lanes, num_processes) == PendingSums(before_last, at_last, left)


@given(st.integers(1, 200))
def test_as_many_are_there_before_a_lane_of_one_process(num_lanes):
    tree_sum = TreeSum(num_lanes, num_lanes, lambda _left, _right: None)
    for lane in range(num_lanes):
        assert pending_before(lane, num_lanes) == len(tree_sum.pending)
        tree_sum.push((lane, lane + 1), None)
