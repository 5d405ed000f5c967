"""A world that is kept runs one function after another, whatever the one before left or broke."""

import os
import time

import pytest
import torch

from tests.patience import patient
from tests.worlds import run_distributed


def act(world, what):
    """Do something that is to leave the next function alone; tell in which process."""
    found = os.getpid(), torch.get_default_dtype(), torch.initial_seed(), "LEFT" in os.environ
    if what == "leave":
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(7)
        os.environ["LEFT"] = "1"
        os.chdir("/")
    if what == "all fail" or (what == "one fails" and world.rank == 0):
        raise ValueError("on purpose")
    if what == "one ends" and world.rank == 1:
        os._exit(3)
    if what in ("one fails", "one stalls") and world.rank == 1:
        time.sleep(patient(100.0))
    return found


def test_what_one_function_leaves_the_next_one_does_not_find():
    first = run_distributed(act, 2, "leave")
    assert len({pid for pid, *_ in first}) == 2
    assert run_distributed(act, 2, "") == first


def test_a_world_goes_on_after_an_error_that_all_ranks_have():
    first = run_distributed(act, 2, "")
    with pytest.raises(RuntimeError, match="on purpose"):
        run_distributed(act, 2, "all fail")
    assert run_distributed(act, 2, "") == first


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("one fails", RuntimeError, "rank 0 failed:(.|\n)*on purpose"),
        ("one ends", RuntimeError, "rank 1 ended without a result"),
        ("one stalls", TimeoutError, r"ranks \[1\] did not end within"),
    ],
)
def test_after_a_rank_that_breaks_a_world_the_next_function_gets_a_new_one(what, error, said):
    """A rank that waits for another must not hang the tests of its file."""
    before = run_distributed(act, 2, "")
    with pytest.raises(error, match=said):
        run_distributed(act, 2, what, timeout_seconds=patient(1.0) if what == "one stalls" else 120.0)
    after = run_distributed(act, 2, "")
    assert not {pid for pid, *_ in before} & {pid for pid, *_ in after}
