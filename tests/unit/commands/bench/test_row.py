"""What a row says of the turns of its processes."""

import json

import pytest

from lanewise.commands.bench.modes import Mode
from lanewise.commands.bench.row import BenchRow
from tests.unit.commands.bench.measured import first, row, turn

ALONE = Mode("single", 1, "close")
DDP = Mode("ddp", 2, "close")
WAITING = (
    "the slowest process: 37% of a step is communication that nothing hides, 90% of which is waiting for it"
)


def test_the_slowest_process_of_a_round_decides():
    measured = BenchRow(DDP, firsts=[first(0), first(1)], rounds=[[turn(1.0), turn(2.0)]] * 3)
    assert measured.samples_per_second == (50, 50, 50)


def test_processes_that_never_talk_add_up():
    measured = BenchRow(
        Mode("single", 2, "close"), firsts=[first(), first()], rounds=[[turn(1), turn(2)]] * 3
    )
    assert measured.samples_per_second == (100, 100, 100)
    assert measured.model == ""


def test_units_are_shown_where_they_are_not_the_samples():
    assert row(ALONE, [1.0] * 5).units_per_second is None
    tokens = BenchRow(ALONE, firsts=[first()], rounds=[[turn(2.0, 100, 6400.0)]])
    assert tokens.units_per_second == (3200, 3200, 3200)


@pytest.mark.parametrize(
    ("seconds", "is_steady"),
    [([1.0] * 5, True), ([1.0] * 4, False), ([0.9, 0.95, 1.0, 1.05, 1.1], False), ([], False)],
)
def test_a_row_is_steady_when_enough_rounds_agree(seconds, is_steady):
    assert row(ALONE, seconds).is_steady is is_steady


def test_faster_is_what_is_faster_beyond_the_spread():
    slow, fast, noisy = row(ALONE, [1.0, 1.1, 1.2]), row(ALONE, [0.8, 0.9, 1.0]), row(ALONE, [0.5, 1.0, 1.5])
    assert fast.is_faster_than(slow)
    assert not slow.is_faster_than(fast)
    assert not noisy.is_faster_than(slow)
    assert not fast.is_faster_than(row(ALONE, []))


def test_what_a_device_computes_is_compared_with_its_peak():
    measured = row(DDP, [1.0] * 5)  # 100 samples/s
    measured.flops_per_sample, measured.precision = 4e11, "bf16"
    assert measured.flops_per_second == 2e13
    assert measured.utilization is None
    measured.firsts = [first(device="NVIDIA H100 80GB HBM3")]
    assert measured.utilization == pytest.approx(2e13 / 989.4e12)


@pytest.mark.parametrize(
    ("phases", "bound"),
    [
        ([{}], "compute: forward and backward are 90% of a step"),
        ([{"data": 1.0}], "data: 51% of a step waits for samples"),
        ([{"optimizer": 1.0}], "the optimizer: its update is 51% of a step"),
        ([{"data": 0.2, "optimizer": 1.0}], "the optimizer: its update is 47% of a step"),
        ([{"communication": 1.0}] * 2, "the link: 51% of a step is communication that nothing hides"),
        ([{"communication": 0.1}, {"communication": 1.0}], WAITING),
    ],
)
def test_the_largest_phase_that_does_not_compute_bounds_a_run(phases, bound):
    assert row(DDP, [1.0] * 5, phases).bound() == bound


def test_the_link_is_named_with_what_is_sent():
    measured = row(DDP, [1.0] * 5, [{"communication": 1.0}] * 2)
    measured.sent_bytes = 3 * 2**20
    assert measured.bound().endswith("nothing hides, for 3 MiB that each process sends")


def test_compute_is_named_with_what_it_reaches():
    measured = row(ALONE, [1.0] * 5)
    measured.flops_per_sample, measured.firsts = 3.24e10, [first(device="Tesla T4")]
    assert measured.bound() == "compute: forward and backward are 90% of a step, at 40% of the device's peak"


def test_memory_is_that_of_the_first_and_of_the_fullest_device():
    measured = BenchRow(DDP, firsts=[first(0, peak_bytes=(5, 3)), first(1, peak_bytes=(7, 2))])
    assert (measured.first_bytes, measured.fullest_bytes) == (5, 7)
    unknown = BenchRow(DDP, firsts=[first(0, peak_bytes=())])
    assert (unknown.first_bytes, unknown.fullest_bytes) == (None, None)


def test_a_row_that_failed_is_written_too():
    failed = BenchRow(DDP, failure="why")
    written = json.loads(json.dumps(failed.to_json()))
    assert written["failure"] == "why"
    assert written["samples_per_second"] is written["bound"] is written["model"] is None
    assert json.loads(json.dumps(row(DDP, [1.0] * 5).to_json()))["bound"].startswith("compute")
