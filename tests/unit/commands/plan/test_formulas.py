"""Every expected number is added up by hand from the memory in `synthetic.py`."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lanewise.commands.plan.formulas import (
    PendingSums,
    peak_memory,
    pending_counts,
    pending_sums,
    sent_bytes,
)
from lanewise.lanes import lane_ranges
from tests.unit.commands.plan.synthetic import measured, setting

PEAK = 2100  # when the backward begins
HELD = 500 + 1000  # parameters and the optimizer's state


@pytest.mark.parametrize(
    ("equality", "reducer", "num_devices", "num_lanes", "expected"),
    [
        ("close", "single", 1, 1, HELD + PEAK),
        ("close", "single", 1, 4, HELD + 500 + PEAK),  # a gradient to which lanes add
        ("exact", "single", 1, 4, HELD + 2 * 500 + PEAK),  # [0, 2) and [2, 3) are pending
        ("close", "ddp", 2, 2, HELD + 500 + PEAK),  # the buckets
        ("close", "ddp", 2, 4, HELD + 500 + 500 + PEAK),  # and the gradient of the lane before
        ("exact", "ddp", 2, 4, HELD + 500 + 500 + PEAK),
        ("close", "data_parallel", 2, 2, HELD + 500 + 1900 + PEAK),  # a replica, with what it saved
        ("close", "data_parallel", 2, 4, HELD + 500 + 1000 + 1900 + PEAK),
        # half of everything; the root, block 2, and block 1 in its buffer, while block 2 goes back
        ("close", "fsdp", 2, 2, HELD / 2 + 100 + 200 + 200 + 2050),
        ("close", "fsdp", 2, 4, HELD / 2 + 250 + 100 + 200 + 200 + 2050),  # to which the second lane adds
        ("exact", "fsdp", 2, 4, HELD / 2 + 250 + 500 + 100 + 200 + 200 + 2050),  # rows of the first lane
    ],
)
def test_the_largest_moment_counts(equality, reducer, num_devices, num_lanes, expected):
    memory = peak_memory(measured(equality=equality), setting(reducer, num_devices, num_lanes))
    assert memory.num_bytes == expected


def test_the_first_of_several_devices_holds_the_outputs_and_losses_of_the_others_unless_balanced():
    apart = measured(shares_memory=False)
    assert peak_memory(apart, setting("balanced_data_parallel", 4, 4)).num_bytes == HELD + PEAK
    assert peak_memory(apart, setting("data_parallel", 4, 4)).num_bytes == HELD + PEAK + 3 * (30 + 20)


def test_gradients_that_come_to_the_first_device_are_added_in_the_tree():
    apart = measured(shares_memory=False, equality="exact")
    assert peak_memory(apart, setting("balanced_data_parallel", 64, 64)).num_bytes == HELD + 7 * 500


def test_an_update_counts_where_it_needs_more_than_a_lane():
    small = measured(update=lambda *part: measured().update(*part)._replace(temporary_bytes=9000))
    memory = peak_memory(small, setting("single", 1, 1))
    assert (memory.activations, memory.temporary) == (0, 9000)
    assert memory.num_bytes == HELD + 500 + 9000


def test_ddp_may_share_out_the_optimizers_state():
    memory = peak_memory(measured(shards_optimizer=True), setting("ddp", 2, 2))
    assert (memory.parameters, memory.optimizer) == (500, 500)
    assert peak_memory(measured(shards_optimizer=True), setting("single", 1, 1)).optimizer == 1000


def test_an_average_and_the_buffers_of_each_lane_are_held():
    more = measured(has_average=True, buffer_bytes=70, changed_buffer_bytes=10)
    memory = peak_memory(more, setting("single", 1, 4))
    assert memory.average == 500 + 70
    assert memory.buffers == 2 * 70 + 5 * 10  # with the start of the step; of each lane, and its next start


def test_shards_in_host_memory_are_not_in_that_of_the_device():
    memory = peak_memory(measured(offloads=True), setting("fsdp", 2, 2))
    assert (memory.parameters, memory.optimizer) == (0, 0)
    assert memory.temporary == 100 + 200 + 200


def test_weights_that_travel_in_half_the_bytes_are_gathered_in_them():
    memory = peak_memory(measured(gathered_itemsize_factor=0.5), setting("fsdp", 2, 2))
    assert memory.temporary == (100 + 200 + 200) / 2


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


def test_one_device_sends_nothing():
    assert sent_bytes(measured(), setting("single", 1, 8)) == 0


@pytest.mark.parametrize(
    ("equality", "num_devices", "num_lanes", "expected"),
    [
        ("close", 2, 2, 2 * 500 / 2),
        ("close", 4, 4, 2 * 500 * 3 / 4),
        ("exact", 4, 4, 2 * 500 * 3 / 4),  # one subtree each: as a ring
        ("exact", 3, 5, 3 * 500 * 2 / 3),  # lanes 2 and 3 are no subtree: both sums travel
    ],
)
def test_ddp_sends_the_gradient_and_what_lanes_tell(equality, num_devices, num_lanes, expected):
    sent = sent_bytes(measured(equality=equality), setting("ddp", num_devices, num_lanes))
    told = (num_devices - 1) * 16 * (-(-num_lanes // num_devices) + 1)
    assert sent == pytest.approx(expected + told)


def test_updated_parameters_are_sent_where_ddp_shares_the_optimizer_out():
    plain, shared = (
        sent_bytes(measured(shards_optimizer=one), setting("ddp", 4, 4)) for one in (False, True)
    )
    assert shared - plain == 500 * 3 / 4


def test_fsdp_gathers_blocks_twice_and_sends_gradients_in_each_lane():
    in_each_lane, told = (2 * 100 + 3 * 200 + 3 * 200) / 2, 16 * 3
    assert sent_bytes(measured(), setting("fsdp", 2, 4)) == 2 * in_each_lane + told


def test_the_first_of_several_devices_sends_the_weights_and_gets_gradients_and_outputs():
    batch, outputs = 50, 2 * 30
    close, exact = (
        replace(of, memory=replace(of.memory, batch_bytes=batch))
        for of in (measured(), measured(equality="exact"))
    )
    assert sent_bytes(close, setting("balanced_data_parallel", 2, 2)) == 500 + 500 + batch
    assert sent_bytes(close, setting("data_parallel", 2, 2)) == 500 + 500 + batch + outputs
    in_exact = sent_bytes(exact, setting("balanced_data_parallel", 2, 4))
    assert in_exact == 500 + 2 * (500 + batch)  # a gradient of every lane of the other device


def test_what_lanes_tell_grows_with_the_number_of_processes():
    gradients = [2 * 500 * (count - 1) / count for count in (2, 101)]
    sent = [sent_bytes(measured(), setting("ddp", count, count)) for count in (2, 101)]
    few, many = (all_of - gradient for all_of, gradient in zip(sent, gradients, strict=True))
    assert many == pytest.approx(100 * few)
