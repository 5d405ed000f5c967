""""""

from dataclasses import replace

import pytest

from lanewise.commands.plan.formulas import Traffic
from lanewise.commands.plan.memory import Memory
from lanewise.commands.plan.result import Machine, Row
from tests.unit.commands.plan.synthetic import setting


def row(traffic: Traffic, machine: Machine, lane_seconds: float | None = 3.0) -> Row:
    """Two lanes for each of two devices, eight samples each."""
    return Row(
        setting("ddp", 2, 4),
        is_checkpointed=False,
        global_batch_size=32,
        memory=Memory(parameters=80),
        fragmentation_bytes=20,
        traffic=traffic,
        machine=machine,
        lane_seconds=lane_seconds,
    )


@pytest.mark.parametrize(
    ("traffic", "exposed"),
    [
        (Traffic(0, 0, 0), 0),
        (Traffic(0, 20, 0), 0),  # 2 s, as long as a backward
        (Traffic(0, 50, 0), 3),
        (Traffic(30, 0, 0), 0),  # 3 s, as long as a lane
        (Traffic(40, 0, 0), 2),  # a second in each lane
        (Traffic(0, 0, 70), 7),
    ],
)
def test_what_no_computation_hides_comes_to_the_time_of_a_step(traffic, exposed):
    one = row(traffic, Machine(link_bytes_per_second=10.0))
    assert one.step is not None
    assert (one.step.compute, one.step.exposed) == pytest.approx((6, exposed))
    assert one.samples_per_second == pytest.approx(32 / (6 + exposed))


def test_the_update_comes_to_the_time_of_a_step():
    one = replace(row(Traffic(0, 0, 0), Machine()), update_seconds=0.5)
    assert one.step is not None
    assert one.step.total == 6.5


def test_a_time_is_not_known_without_the_lanes_or_the_links():
    sends = Traffic(0, 1, 0)
    assert row(sends, Machine(), 1.0).step is None
    assert row(sends, Machine(link_bytes_per_second=1.0), None).step is None
    assert row(Traffic(0, 0, 0), Machine(), 1.0).step is not None


def test_it_fits_with_what_fragmentation_makes_useless():
    assert row(Traffic(0, 0, 0), Machine()).fits
    assert row(Traffic(0, 0, 0), Machine(memory_bytes=100)).fits
    assert not row(Traffic(0, 0, 0), Machine(memory_bytes=99)).fits
