"""Activation checkpointing changes no byte, under any reducer, on any number of processes."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.commands.verify.trace import run_steps
from lanewise.config import (
    ActivationCheckpointingConfig,
    DistributedConfig,
    MemoryConfig,
    PrecisionName,
    RunConfig,
)
from lanewise.engine.engine import build_engine
from lanewise.errors import TaskError, describe
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.reduce.test_fsdp import Deeper
from tests.distributed.tasks import VOCABULARY, configure, train
from tests.slow import slow

NUM_LAYERS = 5


class Layer(nn.Module):
    """What a second run could get wrong: dropout, python's generator, statistics, a buffer that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.sometimes = nn.Parameter(torch.ones(16))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, hidden: torch.Tensor, *, uses_all: bool) -> torch.Tensor:
        if uses_all:
            hidden = hidden * self.sometimes
        normed = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        if self.training:
            self.mean.data.mul_(0.9).add_(normed.detach().mean((0, 1)) + hidden.detach().mean())
        normed = (normed - self.mean) * random.choice([0.5, 2.0])
        return hidden + nn.functional.dropout(torch.relu(self.linear(normed)), 0.2, self.training)


class Layered(nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, uses_all=bool(int(tokens.sum()) % 2))
        return self.head(hidden)


class Checkpointed(Deeper):
    """Ragged batches; some lanes have weight 0, and then a loss that is no number."""

    def build_model(self) -> nn.Module:
        return Layered()


def config_for(reducer: str, devices: int) -> RunConfig:
    return replace(
        configure(Checkpointed, num_lanes=5, steps=4, num_samples=43),
        distributed=DistributedConfig(reducer=reducer, devices=devices, equality="exact", device_type="cpu"),
    )


def train_each(world: World, config: RunConfig, *runs: tuple[PrecisionName, bool]) -> list[Any]:
    """Train in each format, with checkpointing or without."""
    results = []
    for precision, is_checkpointed in runs:
        section = ActivationCheckpointingConfig() if is_checkpointed else None
        memory = MemoryConfig(activation_checkpointing=section)
        results.append(train(world, replace(config, memory=memory, precision=precision)))
    return results


@pytest.fixture(scope="module")
def without() -> list[Any]:
    return run_distributed(train_each, 1, config_for("single", 1), ("float32", False), ("bf16", False))[0]


@pytest.mark.parametrize(
    ("reducer", "num_processes", "devices"),
    [
        ("ddp", 2, 2),
        ("fsdp", 2, 2),
        ("balanced_data_parallel", 1, 3),
        *slow(("single", 1, 1), ("fsdp", 3, 3), ("data_parallel", 1, 2)),
    ],
)
def test_no_byte_changes(without, reducer, num_processes, devices):
    runs = (("float32", True), ("bf16", True))
    results = run_distributed(train_each, num_processes, config_for(reducer, devices), *runs)
    assert results == [without] * num_processes


class Wandering(nn.Module):
    """Goes by a counter of its calls from some call on."""

    def __init__(self, num_good_calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.num_calls = -num_good_calls

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.linear(hidden) * max(1, self.num_calls)


class Astray(Checkpointed):
    def __init__(self, num_samples: int, num_good_calls: int) -> None:
        super().__init__(num_samples)
        self.num_good_calls = num_good_calls

    def build_model(self) -> nn.Module:
        layers = [Wandering(self.num_good_calls) for _ in range(2)]
        return nn.Sequential(nn.Embedding(VOCABULARY, 16), *layers, nn.Linear(16, VOCABULARY))


def train_astray(world: World, num_good_calls: int, verifies: bool) -> str:
    config = configure(Astray, num_lanes=5, steps=4, num_samples=43, num_good_calls=num_good_calls)
    memory = MemoryConfig(activation_checkpointing=ActivationCheckpointingConfig())
    try:
        if verifies:
            list(run_steps(build_engine(replace(config, memory=memory), world), world, [0, 1]))
        else:
            train(world, replace(config, memory=memory))
    except TaskError as error:
        return describe(error)
    return ""


CALLS_OF_A_STEP = 10
"""Five lanes, each with a second run."""
CALLS_OF_FURTHER_RUNS = 4
"""Those of the first lane, each with a second run too."""


@pytest.mark.parametrize(
    ("num_good_calls", "verifies", "said"),
    [
        (
            0,
            False,
            r"2, a Wandering, returned something else when it ran again.*counter(.|\n)*step 1, lane 0",
        ),
        (CALLS_OF_A_STEP, True, r"2, a Wandering, returned something else.*counter(.|\n)*step 2, lane"),
        # A run compares in its first step alone; in the second one the further runs of a lane do.
        (
            CALLS_OF_A_STEP + CALLS_OF_FURTHER_RUNS,
            False,
            "num_calls changed in the forward, loss or backward of lanes(.|\n)*step 2 depends",
        ),
    ],
)
def test_a_block_that_does_not_repeat_itself_is_named_in_the_first_step_and_in_verify(
    num_good_calls, verifies, said
):
    (found,) = run_distributed(train_astray, 1, num_good_calls, verifies)
    assert re.search(said, found), found
