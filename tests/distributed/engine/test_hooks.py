"""What a user hangs onto parameters, modules and autograd's nodes, and what runs inside of a backward."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from lanewise.config import DistributedConfig
from lanewise.errors import TaskError
from lanewise.lanes import Placement, Schedule, lane_ranges
from lanewise.reduce import build_reducer
from lanewise.testing import run_distributed
from tests.slow import slow

NUM_LANES = 4


class Branches(nn.Module):
    """Lane 0 uses both branches, odd lanes the first, lane 2 the second; one parameter no lane uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, lane: int) -> torch.Tensor:
        hidden = torch.arange(3.0 * (lane + 1), 3.0 * (lane + 2)).requires_grad_()
        if lane != 2:
            hidden = self.first(hidden)
        if lane in (0, 2):
            hidden = self.second(hidden)
        return hidden.square().sum()


def reduce(world: Any, model: nn.Module, equality: str, num_steps: int = 3) -> list[list[float]]:
    """Return the gradients of the last of some equal steps."""
    reducer = build_reducer(
        model, Placement.of(NUM_LANES, world), world, DistributedConfig(equality=equality)
    )
    for turn in Schedule(NUM_LANES, NUM_LANES, 1).turns(
        lane_ranges(NUM_LANES, world.world_size)[world.rank], 0, num_steps
    ):
        # Lane 3 has no weight.
        loss = model(turn.lane)
        reducer.backward(turn, None if turn.lane == 3 else loss, None)
        if turn.is_last:
            reducer.finish(1.0)
            gradients = [parameter.grad.flatten().tolist() for parameter in model.parameters()]
            model.zero_grad()
    reducer.close()
    return gradients


def hang(kind: str, model: Branches, seen: list[Any]) -> None:
    """Hang a hook of one kind on the model, that notes what it gets and fails where that is no tensor."""

    def note(place: int, gradient: torch.Tensor) -> torch.Tensor:
        seen.append((place, gradient.flatten().tolist()))
        return gradient * 0.5  # tensor hooks may give another gradient

    def note_only(place: int, _: Any, gradients: Any) -> None:
        note(place, *gradients)

    for place, parameter in enumerate(model.parameters()):
        if kind == "tensor":
            parameter.register_hook(partial(note, place))
        elif kind == "accumulated":
            parameter.register_post_accumulate_grad_hook(lambda _, place=place: seen.append(place))
        elif kind == "node":
            get_gradient_edge(parameter).node.register_hook(partial(note_only, place))
        elif kind == "node before":
            get_gradient_edge(parameter).node.register_prehook(
                lambda given, place=place: (note(place, given[0]),)
            )
    if kind == "module":
        for place, module in enumerate((model.first, model.second)):
            module.register_full_backward_hook(
                lambda _m, _i, outs, place=place: seen.append((place, outs[0].tolist()))
            )
    if kind in ("all", "any"):

        def note_all(gradients: Any) -> None:
            every = [gradients] if kind == "any" else gradients
            seen.append([None if one is None else one.flatten().tolist() for one in every])

        register_multi_grad_hook(list(model.parameters()), note_all, mode=kind)


KINDS = ["tensor", "accumulated", "node", "node before", "module", "all", "any"]


def run_hooks(world: Any, equality: str) -> Any:
    results = []
    for kind in KINDS:
        model, seen = Branches(), []
        held = [get_gradient_edge(parameter).node for parameter in model.parameters()]
        hang(kind, model, seen)
        gradients = reduce(world, model, equality)
        assert held
        results.append((kind, gradients, seen))
    return results


@pytest.fixture(scope="module")
def alone():
    return {equality: run_distributed(run_hooks, 1, equality)[0] for equality in ("close", "exact")}


@pytest.mark.parametrize(("world_size", "equality"), [(3, "exact"), *slow((2, "exact"), (3, "close"))])
def test_hooks_of_every_kind_see_the_same_lanes_on_any_number_of_processes(alone, world_size, equality):
    """Each process sees its own lanes; together they see what one process sees, and never None."""
    ranks = run_distributed(run_hooks, world_size, equality)
    for number, (kind, gradients, seen) in enumerate(alone[equality]):
        assert seen, kind
        assert all(
            torch.allclose(*map(torch.tensor, pair))
            for rank in ranks
            for pair in zip(rank[number][1], gradients, strict=True)
        ), kind
        together = [one for rank in ranks for one in rank[number][2]]
        assert sorted(map(repr, together)) == sorted(map(repr, seen)), kind


@pytest.mark.parametrize("reducer", ["data_parallel", "balanced_data_parallel", "fsdp"])
def test_a_reducer_that_trains_other_parameters_refuses_their_hooks(reducer):
    for failure in run_distributed(refuse_hooks, 2 if reducer == "fsdp" else 1, reducer):
        assert f"parameter first.bias has a hook for its gradient, which {reducer} would not call" in failure


def refuse_hooks(world: Any, reducer: str) -> str:
    model = Branches()
    model.first.bias.register_hook(print)
    try:
        build_reducer(
            model,
            Placement.of(4, world),
            world,
            DistributedConfig(reducer=reducer, devices=2, device_type="cpu"),
        )
    except TaskError as error:
        return str(error)
    return "no error"


class Checkpointed(Branches):
    """Runs its branches in reentrant checkpoints, one twice; a parameter of it is used outside as well."""

    def forward(self, lane: int) -> torch.Tensor:
        hidden = torch.arange(3.0 * (lane + 1), 3.0 * (lane + 2)).requires_grad_()
        for layer in (self.first, self.second, self.first) if lane != 2 else (self.second,):
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        return (hidden * self.first.bias).square().sum()


class Plain(Branches):
    """The same without checkpoints."""

    def forward(self, lane: int) -> torch.Tensor:
        hidden = torch.arange(3.0 * (lane + 1), 3.0 * (lane + 2)).requires_grad_()
        for layer in (self.first, self.second, self.first) if lane != 2 else (self.second,):
            hidden = layer(hidden)
        return (hidden * self.first.bias).square().sum()


def run_checkpointed(world: Any, equality: str) -> list[list[float]]:
    return reduce(world, Checkpointed(), equality)


def run_plain(world: Any) -> list[list[float]]:
    return reduce(world, Plain(), "exact")


def test_reentrant_activation_checkpointing_works_on_any_number_of_processes():
    (alone,) = run_distributed(run_checkpointed, 1, "exact")
    (plain,) = run_distributed(run_plain, 1)
    assert all(torch.allclose(*map(torch.tensor, pair)) for pair in zip(alone, plain, strict=True))
    for world_size in (2, 3):
        assert run_distributed(run_checkpointed, world_size, "exact") == [alone] * world_size
    for close in run_distributed(run_checkpointed, 2, "close"):
        assert all(torch.allclose(*map(torch.tensor, pair)) for pair in zip(alone, close, strict=True))
