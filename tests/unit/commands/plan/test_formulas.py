"""Every expected number is added up by hand from the tape of `synthetic.py`."""

import pytest

from lanewise.commands.plan.formulas import peak_memory
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
