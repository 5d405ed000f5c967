"""Activation checkpointing changes no byte, under any reducer, on any number of processes."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.config import (
    ActivationCheckpointingConfig,
    DistributedConfig,
    MemoryConfig,
    PrecisionName,
    RunConfig,
)
from lanewise.testing import run_distributed
from lanewise.world.world import World
from tests.distributed.tasks import VOCABULARY, configure, train
from tests.distributed.test_fsdp import Deeper

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


def train_each(world: World, config: RunConfig, *runs: tuple[PrecisionName, int | None]) -> list[Any]:
    """Train in each format with so many layers in a segment; None: without checkpointing."""
    results = []
    for precision, every in runs:
        section = None if every is None else ActivationCheckpointingConfig(every=every)
        memory = MemoryConfig(activation_checkpointing=section)
        results.append(train(world, replace(config, memory=memory, precision=precision)))
    return results


@pytest.fixture(scope="module")
def without() -> list[Any]:
    return run_distributed(train_each, 1, config_for("single", 1), ("float32", None), ("bf16", None))[0]


@pytest.mark.parametrize(
    ("reducer", "num_processes", "devices"),
    [
        ("single", 1, 1),
        ("ddp", 2, 2),
        ("fsdp", 2, 2),
        pytest.param("fsdp", 3, 3, marks=pytest.mark.slow),
        ("data_parallel", 1, 2),
        ("balanced_data_parallel", 1, 3),
    ],
)
def test_no_byte_changes(without, reducer, num_processes, devices):
    runs = (("float32", 1), ("float32", NUM_LAYERS), ("bf16", 2))
    results = run_distributed(train_each, num_processes, config_for(reducer, devices), *runs)
    in_float32, in_bf16 = without
    assert results == [[in_float32, in_float32, in_bf16]] * num_processes
