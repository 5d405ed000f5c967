"""Which rows changed since an earlier measurement."""

from typing import Any

import pytest

from lanewise.commands.bench.compare import compare, describe_machine, describe_work, require_comparable
from lanewise.errors import ConfigError
from tests.distributed.tasks import Smooth, configure


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
                "failure": None,
                "num_rounds": 5,
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


@pytest.mark.parametrize("which", [0, 1])
def test_of_few_rounds_no_change_is_known(which):
    """Of one round the middle half is one number, which any other does not meet."""
    both = [measurement(ddp=100), measurement(ddp=50)]
    both[which]["rows"][0]["num_rounds"] = 4
    assert list(compare(*both)) == []


def test_rows_that_only_one_of_them_has_are_left_out():
    after = measurement(ddp=1, fsdp=1)
    after["rows"][0]["samples_per_second"] = None
    assert list(compare(measurement(ddp=100, single=100), after)) == []


def test_a_row_that_fails_now_is_worse_than_a_slow_one():
    """It was left out, and CI did not notice that a mode broke."""
    after = measurement(ddp=100)
    after["rows"][0] |= {"samples_per_second": None, "failure": "why"}
    (change,) = compare(measurement(ddp=100), after)
    assert change.is_slower
    assert str(change) == "ddp fails: 100 samples/s before"


CONFIG = configure(Smooth)


def here() -> dict[str, Any]:
    return {**measurement(ddp=100), "machine": describe_machine(), "work": describe_work(CONFIG)}


def test_another_machine_or_another_work_is_refused_before_anything_is_measured():
    require_comparable(here(), CONFIG)
    other = here()
    other["machine"]["cores"] = 6400
    with pytest.raises(ConfigError, match=r"got cores 6400 before, .* Measure the earlier version here"):
        require_comparable(other, CONFIG)
    other = here()
    other["work"]["global_batch_size"] = 64
    with pytest.raises(ConfigError, match="global_batch_size 64 before, and 16 now"):
        require_comparable(other, CONFIG)


ZERO, INFINITE, HUGE = (
    {**measurement(a=1)["rows"][0], "samples_per_second": dict.fromkeys(("low", "median", "high"), speed)}
    for speed in (0, float("inf"), 10**400)
)


@pytest.mark.parametrize(
    "before",
    [{}, [], {"machine": 1}, {"rows": [{}]}, {"rows": [ZERO]}, {"rows": [INFINITE]}, {"rows": [HUGE]}, None],
)
def test_what_is_no_measurement_is_one_error(before):
    before = {**here(), **before} if isinstance(before, dict) and "rows" in before else before
    with pytest.raises(ConfigError, match="what an earlier `lanewise bench --json` wrote"):
        require_comparable(before, CONFIG)
