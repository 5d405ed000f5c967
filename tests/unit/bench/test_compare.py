"""Which rows changed since an earlier measurement."""

import copy

import pytest

from lanewise.bench.compare import compare
from lanewise.errors import ConfigError


def measurement(**medians: float):
    return {
        "machine": {"processor": "A", "cores": 2},
        "work": {"task": "a.B", "global_batch_size": 8},
        "rows": [
            {
                "name": name,
                "reducer": name,
                "num_devices": 2,
                "equality": "close",
                "samples_per_second": {"low": 0.98 * median, "median": median, "high": 1.02 * median},
            }
            for name, median in medians.items()
        ],
    }


def test_rows_that_changed_beyond_their_spread_are_named():
    before, after = measurement(ddp=100, fsdp=100, single=100), measurement(ddp=120, fsdp=90, single=101)
    changes = list(compare(before, after))
    assert [(change.name, change.is_slower) for change in changes] == [("ddp", False), ("fsdp", True)]
    assert str(changes[1]) == "fsdp got slower: 90 samples/s, 100 before (-10.0%)"


def test_a_row_whose_middle_halves_meet_did_not_change():
    after = measurement(ddp=90)
    after["rows"][0]["samples_per_second"]["high"] = 99
    assert list(compare(measurement(ddp=100), after)) == []


def test_small_changes_are_noise_however_steady_the_rows_were():
    after = measurement(ddp=97)
    after["rows"][0]["samples_per_second"] = {"low": 97, "median": 97, "high": 97}
    assert list(compare(measurement(ddp=100), after)) == []


def test_rows_that_only_one_of_them_has_are_left_out():
    after = measurement(ddp=1, fsdp=1)
    after["rows"][0]["samples_per_second"] = None
    assert list(compare(measurement(ddp=100, single=100), after)) == []


def test_another_machine_or_another_work_is_refused():
    now = measurement(ddp=100)
    other = copy.deepcopy(now)
    other["machine"]["cores"] = 64
    with pytest.raises(
        ConfigError, match=r"got cores 64 before, and 2 now\. Measure the earlier version here"
    ):
        list(compare(other, now))
    other = copy.deepcopy(now)
    other["work"]["global_batch_size"] = 64
    with pytest.raises(ConfigError, match="global_batch_size 64 before, and 8 now"):
        list(compare(other, now))


@pytest.mark.parametrize("before", [{}, [], {"machine": 1}, {**measurement(), "rows": [{}]}, None])
def test_what_is_no_measurement_is_one_error(before):
    with pytest.raises(ConfigError, match="what an earlier `lanewise bench --json` wrote"):
        list(compare(before, measurement(ddp=1)))
