"""`exact`: the same bytes on any number of processes."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.tasks import VOCABULARY, Language, configure, train
from tests.slow import slow


@pytest.fixture(scope="module")
def alone():
    # 53 samples in steps of 16: the fourth step of an epoch has 5 samples on 3 of the 8 lanes.
    return run_distributed(train, 1, configure(Language))[0]


@pytest.mark.parametrize(
    ("world_size", "one_machine"),
    [
        (2, False),
        (3, True),
        *slow((2, True), (3, False), (5, True), (8, True)),
    ],
)
def test_a_transformer_ends_with_the_same_bytes_and_losses(alone, world_size, one_machine):
    for state, losses in run_distributed(train, world_size, configure(Language), one_machine=one_machine):
        assert losses == alone[1]
        assert state == alone[0]


@pytest.mark.parametrize("world_size", [*slow(2), 3])
def test_bf16_ends_with_the_same_bytes_too(alone, world_size):
    config = configure(Language, precision="bf16")
    single = run_distributed(train, 1, config)[0]
    assert single[0] != alone[0]
    for result in run_distributed(train, world_size, config):
        assert result == single


def count(model: nn.Module, _inputs: Any, _outputs: Any) -> None:
    model.seen.add_(8)


class DrawsLate(Language):
    """Draws from numpy's and python's generators in some lanes only, and not in the first steps."""

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        draws = int(batch.sum()) % 3 == 0 and model.seen > 20
        batch.add_(1).remainder_(VOCABULARY)  # a forward gets its batch once, and may change it
        if draws:
            model.noise.add_(np.random.random_sample())  # noqa: NPY002
            return super().forward(model, batch) * (1 + 0.1 * random.random())
        return super().forward(model, batch)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("noise", torch.zeros(()))
        model.register_buffer("seen", torch.zeros(()))
        model.register_forward_hook(count)
        return model


def test_a_forward_that_draws_from_numpy_late_and_in_some_lanes_only_ends_with_the_same_bytes():
    """Such a generator was not seeded until something drew from it."""
    single = run_distributed(train, 1, configure(DrawsLate))[0]
    assert single[0]["noise"] != bytes(4)
    for world_size in (2, 3):
        for result in run_distributed(train, world_size, configure(DrawsLate)):
            assert result == single


class DrawsInBackward(Language):
    """Adds noise from numpy's generator to gradients, from a backward of the process on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.num_calls = 0

        def add_noise(gradient: torch.Tensor) -> torch.Tensor | None:
            self.num_calls += 1
            return gradient * np.random.random_sample() if self.num_calls > self.first else None  # noqa: NPY002

        model.block.linear1.weight.register_hook(add_noise)
        return model


def test_a_backward_that_draws_from_numpy_ends_with_the_same_bytes():
    """The forward draws nothing, so its lane would not be seeded for it."""
    config = configure(DrawsInBackward, first=0)
    single = run_distributed(train, 1, config)[0]
    for world_size in (2, 3):
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


class Zoo(nn.Module):
    """Layers whose parameters are unusual: parametrized, in lists, complex, in float64, of many shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 8, mode="max")
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True, add_bias_kv=True)
        self.normed = parametrizations.weight_norm(nn.Linear(16, 8))
        self.turned = parametrizations.orthogonal(nn.Linear(8, 8))
        self.scales = nn.ParameterList([torch.ones(8), torch.full((), 0.5)])
        self.waves = nn.Linear(8, 8, dtype=torch.complex64)
        self.precise = nn.Linear(8, 8).double()
        self.pairs = nn.Bilinear(8, 8, VOCABULARY)
        self.slope = nn.PReLU()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.lstm(self.embedding(tokens))[0]
        hidden = self.turned(self.normed(self.attention(hidden, hidden, hidden)[0]))
        hidden = self.waves((hidden * self.scales[0] + self.scales[1]).to(torch.complex64)).abs()
        hidden = self.precise(hidden.double()).float()
        return self.slope(self.pairs(hidden, self.bag(tokens).unsqueeze(1).expand_as(hidden).contiguous()))


class InTheZoo(Language):
    def build_model(self) -> nn.Module:
        return Zoo()


def test_layers_with_unusual_parameters_end_with_the_same_bytes():
    config = configure(InTheZoo, num_lanes=4, steps=4)
    single = run_distributed(train, 1, config)[0]
    for result in run_distributed(train, 2, config):
        assert result == single


class Matrices(Language):
    """Muon takes matrices only."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY, bias=False))


REFUSED = ("Optimizer", "SparseAdam")
OPTIMIZERS = [
    name for name, one in vars(torch.optim).items() if isinstance(one, type) and name not in REFUSED
]


def train_with_each(world: World) -> dict[str, Any]:
    return {
        name: train(world, configure(Matrices, num_lanes=4, steps=3, optimizer=f"torch.optim.{name}"))
        for name in OPTIMIZERS
    }


def test_every_optimizer_of_torch_ends_with_the_same_bytes():
    assert "AdamW" in OPTIMIZERS
    single = run_distributed(train_with_each, 1)[0]
    for results in run_distributed(train_with_each, 2):
        assert results == single
