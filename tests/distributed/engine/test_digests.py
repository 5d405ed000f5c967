"""What small runs leave has the digests of a committed table, on any devices.

A change that is to leave results alone leaves digests.json alone; a change of results writes it anew, and
its message says why: python -m tests.distributed.digests
"""

import pytest

from lanewise.testing import run_distributed
from tests.distributed.digests import NAMES, RUNS, digests_of, machine, remembered
from tests.slow import slow

FEW = NAMES[::7]
"""Of each kind of run about one, which `make test` trains."""
_NOT_UNDER_FSDP = ("own loop", "closure", "optimizer Noisy", "NotContiguous", "DrawsInBackward")
"""An own loop chooses its reducer itself; the others need whole parameters."""


@pytest.fixture
def expected():
    table = remembered()
    if machine() not in table:
        pytest.skip(
            f"digests.json has no digests of {machine()}: python -m tests.distributed.digests adds them"
        )
    return table[machine()]


def test_the_table_has_every_run(expected):
    assert tuple(expected) == NAMES


@pytest.mark.parametrize(
    ("names", "reducer", "num_processes"),
    [
        pytest.param(FEW, "ddp", 1, id="few"),
        *slow((NAMES, "ddp", 1), (NAMES, "ddp", 2), (NAMES, "ddp", 3)),
        *slow((tuple(name for name in NAMES if not name.startswith(_NOT_UNDER_FSDP)), "fsdp", 2)),
    ],
)
def test_each_run_leaves_what_it_left_before(expected, names, reducer, num_processes):
    for found in run_distributed(digests_of, num_processes, reducer, names, timeout_seconds=170):
        assert {name: digest for name, digest in found.items() if digest != expected[name]} == {}


def test_another_seed_is_another_digest(expected):
    """So the comparison can fail."""
    assert expected["train seed"] != expected["Whole float32"]
    assert "train seed" in RUNS
