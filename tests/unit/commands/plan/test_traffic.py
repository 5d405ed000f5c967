import pytest

from lanewise.commands.plan.traffic import Traffic, traffic_of
from tests.unit.commands.plan.synthetic import measured, setting


def test_one_device_sends_nothing():
    assert traffic_of(measured(), setting("single", 1, 8)) == Traffic(0, 0, 0)


@pytest.mark.parametrize(
    ("equality", "num_devices", "num_lanes", "expected"),
    [
        ("close", 2, 2, 2 * 500 / 2),
        ("close", 4, 4, 2 * 500 * 3 / 4),
        ("exact", 4, 4, 2 * 500 * 3 / 4),  # one subtree each: as a ring
        ("exact", 3, 5, 3 * 500 * 2 / 3),  # lanes 2 and 3 are no subtree: both sums travel
    ],
)
def test_ddp_sends_the_gradient_beside_the_last_backward(equality, num_devices, num_lanes, expected):
    traffic = traffic_of(measured(equality=equality), setting("ddp", num_devices, num_lanes))
    assert traffic.of_last_backward == pytest.approx(expected)
    assert traffic.of_each_lane == 0


def test_updated_parameters_are_sent_where_ddp_shares_the_optimizer_out():
    plain, shared = (
        traffic_of(measured(shards_optimizer=one), setting("ddp", 4, 4)) for one in (False, True)
    )
    assert shared.between - plain.between == 500 * 3 / 4


def test_fsdp_gathers_blocks_twice_and_sends_gradients_in_each_lane():
    traffic = traffic_of(measured(), setting("fsdp", 2, 4))
    assert traffic.of_each_lane == (2 * 100 + 3 * 200 + 3 * 200) / 2
    assert traffic.num_bytes(2) == 2 * traffic.of_each_lane + traffic.between


def test_the_first_of_several_devices_sends_the_weights_and_gets_gradients_and_outputs():
    batch, outputs = 50, 2 * 30
    assert traffic_of(measured(), setting("balanced_data_parallel", 2, 2)).between == 500 + 500 + batch
    assert traffic_of(measured(), setting("data_parallel", 2, 2)).between == 500 + 500 + batch + outputs
    in_exact = traffic_of(measured(equality="exact"), setting("balanced_data_parallel", 2, 4))
    assert in_exact.between == 500 + 2 * (500 + batch)  # a gradient of every lane of the other device


def test_what_lanes_tell_grows_with_the_number_of_processes():
    few, many = (traffic_of(measured(), setting("ddp", count, count)).between for count in (2, 101))
    assert many == 100 * few
