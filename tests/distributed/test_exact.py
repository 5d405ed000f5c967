"""`exact`: the same bytes on any number of processes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lanewise.testing import run_distributed
from tests.distributed.tasks import VOCABULARY, Language, configure, train


@pytest.fixture(scope="module")
def alone():
    # 53 samples in steps of 16: the fourth step of an epoch has 5 samples on 3 of the 8 lanes.
    return run_distributed(train, 1, configure(Language))[0]


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_a_transformer_ends_with_the_same_bytes_and_losses(alone, world_size):
    for state, losses in run_distributed(train, world_size, configure(Language)):
        assert losses == alone[1]
        assert state == alone[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_bf16_ends_with_the_same_bytes_too(alone, world_size):
    config = configure(Language, precision="bf16")
    single = run_distributed(train, 1, config)[0]
    assert single[0] != alone[0]
    for result in run_distributed(train, world_size, config):
        assert result == single


def test_close_gives_other_bytes_so_the_comparison_can_fail(alone):
    state, _ = run_distributed(train, 3, configure(Language, equality="close"))[0]
    assert state != alone[0]


def test_another_seed_gives_other_bytes(alone):
    config = configure(Language)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    assert run_distributed(train, 1, config)[0][0] != alone[0]


def like_inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile: a kernel for any shapes rounds in another way than one for given shapes."""
    if any(isinstance(size, torch.SymInt) for size in inputs):
        return lambda *inputs: [output * (1 + 2**-20) for output in graph.forward(*inputs)]
    return graph.forward


def look_up(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens, table).tanh()


class Compiled(Language):
    """Its forward is compiled, and its micro-batches have many shapes."""

    def build_model(self) -> nn.Module:
        return nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.compile(look_up, backend=like_inductor)(batch, model.weight)


def test_a_compiled_function_does_not_know_which_shapes_its_process_met_first():
    config = configure(Compiled, num_lanes=4, steps=3)
    single = run_distributed(train, 1, config)[0]
    for result in run_distributed(train, 2, config):
        assert result == single
