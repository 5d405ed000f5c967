"""A generator that lanes move on is refused; one that they seed, or only hold, is not."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.engine.step.guard.own_generators import OwnGenerators
from lanewise.engine.step.message import StepTotals
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.random_state import set_random_state


def turn(step, lane):
    return LaneTurn(0, step, lane, range(1), range(4), is_last=False)


def run(looks, forward, backward=lambda: None, num_steps=4):
    """Run a few steps of two lanes, each under a seed of its own."""
    for step in range(num_steps):
        looks.begin(turn(step, 0))
        for lane in range(2):
            set_random_state(100 * step + lane)
            forward()
            looks.after_forward(turn(step, lane), None)
            backward()
            looks.after_backward(turn(step, lane))
        if looks.finish(StepTotals([])):
            return step + 1
    raise AssertionError("it looks for ever")


DRAWS = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda one: torch.rand(3, generator=one)),
    "python": (lambda: random.Random(7), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(7), lambda one: one.random()),
    "numpy's old one": (lambda: np.random.RandomState(7), lambda one: one.rand()),
    "many at once": (lambda: np.random.RandomState(7), lambda one: one.rand(100_000)),
    "of another kind": (
        lambda: np.random.RandomState(np.random.PCG64(7)),
        lambda one: one.random_sample(),
    ),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_generator_that_a_forward_moves_on_is_named_with_lane_and_remedy(kind):
    make, draw = DRAWS[kind]
    task = SimpleNamespace(noise=make())
    with pytest.raises(TaskError) as error:
        run(OwnGenerators(nn.Linear(1, 1), task=task), lambda: draw(task.noise))
    said = str(error.value)
    assert "generator task.noise drew random numbers in the forward or the loss of lane 1 in step 1" in said
    assert "Draw from the default generators" in said
    assert "make the generator anew in each call" in said


def test_a_generator_of_a_module_that_a_backward_moves_on_is_named():
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].rngs = [random.Random(7)]
    with pytest.raises(TaskError, match=r"model\.0\.rngs\.0 drew .* in the backward of lane 1 in step 1"):
        run(OwnGenerators(model), lambda: None, model[0].rngs[0].random)


def test_a_process_with_one_lane_in_a_step_finds_it_in_the_second():
    task = SimpleNamespace(noise=random.Random(7))
    looks = OwnGenerators(nn.Linear(1, 1), task=task)
    looks.begin(turn(0, 3))
    task.noise.random()
    looks.after_forward(turn(0, 3), None)
    assert not looks.finish(StepTotals([]))
    looks.begin(turn(1, 3))
    task.noise.random()
    with pytest.raises(TaskError, match="lane 3 in step 2"):
        looks.after_forward(turn(1, 3), None)


def seeded(seed):
    """Seed each kind of generator in each lane, and draw."""

    def forward(task):
        torch.rand(3, generator=task.torch.manual_seed(seed()))
        task.python.seed(seed())
        task.python.random()
        task.old.seed(seed() % 2**32)
        task.old.rand()
        task.anew = np.random.default_rng(seed())
        task.anew.random()

    return forward


@pytest.mark.parametrize("seed", [torch.initial_seed, lambda: 7], ids=["of the lane", "always the same"])
def test_a_generator_that_lanes_seed_is_right(seed):
    task = SimpleNamespace(
        torch=torch.Generator().manual_seed(7),
        python=random.Random(7),
        old=np.random.RandomState(7),
        anew=np.random.default_rng(7),
    )
    assert run(OwnGenerators(nn.Linear(1, 1), task=task), lambda: seeded(seed)(task)) == 4


class Samples(Dataset):
    def __init__(self):
        self.rng = random.Random(7)


def test_what_a_dataset_draws_while_it_is_read_is_not_the_forwards():
    task = SimpleNamespace(data=Samples())
    assert run(OwnGenerators(nn.Linear(1, 1), task=task), task.data.rng.random) == 1


def test_nothing_is_looked_at_where_there_is_no_generator():
    """The default generators are seeded; one that draws from the system has no state."""
    task = SimpleNamespace(
        default=torch.default_generator,
        python=random.random.__self__,
        numpy=np.random.mtrand._rand,
        system=random.SystemRandom(),
    )

    def forward():
        (torch.rand(3), random.random(), np.random.rand(), task.system.random())  # noqa: NPY002

    assert run(OwnGenerators(nn.Linear(1, 1), task=task), forward) == 1
