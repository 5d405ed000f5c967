"""State that lanewise cannot see, by name."""

import gc
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lanewise.config import DistributedConfig
from lanewise.reduce import build_reducer
from lanewise.testing import run_distributed
from lanewise.verify.hidden import changed, hidden_state


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.level = torch.zeros(3)
        self.history = deque([1, 2])
        self.config = {"rates": [0.1, 0.2]}


def test_parameters_and_buffers_are_not_hidden():
    model = Counting()
    before = hidden_state(model)
    with torch.no_grad():
        model.inner.weight.add_(1)
        model.norm.running_mean.add_(1)
    assert changed(before, hidden_state(model)) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.level.add_(1), "model.level"),
        (lambda model: model.history.append(3), "model.history.2"),
        (lambda model: model.config["rates"].__setitem__(1, 0.3), "model.config.rates.1"),
        (lambda model: setattr(model.inner, "calls", 1), "model.inner.calls"),
    ],
)
def test_a_change_is_named(change, name):
    model = Counting()
    before = hidden_state(model)
    change(model)
    assert changed(before, hidden_state(model)) == [name]


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda one: torch.rand((), generator=one)),
        (np.random.default_rng(0), lambda one: one.random()),
        (np.random.RandomState(0), lambda one: one.rand()),
        (random.Random(0), lambda one: one.random()),
    ],
)
def test_a_generator_that_drew_is_named_as_one(generator, draw):
    task = SimpleNamespace(noise=generator)
    before = hidden_state(nn.Linear(1, 1), task=task)
    draw(generator)
    assert changed(before, hidden_state(nn.Linear(1, 1), task=task)) == ["task.noise (a generator)"]


def test_modules_that_are_not_of_the_model_count_with_their_weights():
    model, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    task = SimpleNamespace(model=model, teacher=teacher)
    before = hidden_state(model, task=task)
    with torch.no_grad():
        model.weight.add_(1)
        teacher.weight.add_(1)
    assert changed(before, hidden_state(model, task=task)) == ["task.teacher.weight"]


def test_what_refers_to_itself_ends():
    task = SimpleNamespace(count=1)
    task.itself = task
    assert set(hidden_state(nn.Linear(1, 1), task=task)) >= {"task.count"}


def test_looking_twice_gives_the_same():
    """Values were left out once where Python gave the identity of a freed object to another one."""
    model = nn.Sequential(*[Counting() for _ in range(20)])
    looks = []
    for _ in range(5):
        looks.append(hidden_state(model))
        gc.collect()
    assert all(look == looks[0] for look in looks)
    assert sum(name.endswith("in_features") for name in looks[0]) == 20


def state_of_sharded(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    reducer = "single" if world.world_size == 1 else "fsdp"
    built = build_reducer(model, 2, world, DistributedConfig(reducer=reducer))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = hidden_state(model, optimizer=optimizer)
    built.close()
    return state


def test_a_sharded_model_hides_no_more_than_a_plain_one_and_its_optimizer_is_seen_whole():
    (plain,) = run_distributed(state_of_sharded, 1)
    assert any("exp_avg" in name for name in plain)
    assert run_distributed(state_of_sharded, 2) == [plain, plain]
