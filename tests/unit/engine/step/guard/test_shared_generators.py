"""A draw from a generator that lanes share is told from what two second runs of forwards leave behind."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lanewise.engine.step.guard.shared_generators import SharedGenerators
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.random_state import set_random_state


def run(forward, backward, *, at_once=True, equality="exact"):
    """Run a round of two lanes, whose forwards end before the first look."""
    look = SharedGenerators(equality, SimpleNamespace(replicas=[None, None], runs_at_once=at_once))
    turns = [LaneTurn(0, 0, lane, range(1), range(2), is_last=lane == 1) for lane in range(2)]
    look.begin(turns[0])
    for lane in range(2):
        set_random_state(lane)
        forward()
    look.after_forward(turns[0], None)
    look.after_backward(turns[0])
    look.after_forward(turns[1], None)
    backward()
    look.after_backward(turns[1])


def nothing():
    pass


def leave_the_state_of_another_lane():
    """End as two second runs do which overlap: the first puts back, then the second what it had found."""
    generator = torch.Generator().manual_seed(0)
    torch.set_rng_state(generator.get_state())


DRAWS = {
    "python's": random.random,
    "numpy's": np.random.rand,
    "torch's": lambda: torch.rand(3),
}


def test_second_runs_that_overlap_are_no_draw():
    run(nothing, leave_the_state_of_another_lane)


@pytest.mark.parametrize("whose", DRAWS)
def test_a_forward_that_draws_from_a_generator_of_the_host_is_an_error_in_threads(whose):
    with pytest.raises(TaskError) as error:
        run(DRAWS[whose], nothing)
    said = str(error.value)
    assert said.startswith("forward or loss of lane 0, or of one that runs beside it, in step 1 drew")
    assert f"from {whose} generator," in said
    assert "collate" in said
    assert "distributed.reducer=ddp" in said
    run(DRAWS[whose], nothing, at_once=False)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("whose", DRAWS)
def test_a_backward_that_draws_is_an_error(whose, at_once):
    with pytest.raises(
        TaskError, match=f"the backward of lanes 0 to 1 in step 1 drew .* from {whose} generator,"
    ):
        run(nothing, DRAWS[whose], at_once=at_once)


def test_close_warns_once_of_what_a_forward_drew(caplog):
    run(random.random, leave_the_state_of_another_lane, equality="close")
    (record,) = caplog.records
    assert "drew random numbers from python's generator" in record.message
