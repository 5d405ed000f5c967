"""What each process holds under fsdp, when, for how long, and what it sends."""

import gc
import math
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lanewise.config import DistributedConfig
from lanewise.data import LaneBatch
from lanewise.errors import TaskError
from lanewise.lanes import Placement, Schedule, lane_ranges
from lanewise.processes.world.shards import is_sharded, whole
from lanewise.reduce import Reducer, build_reducer
from tests.slow import slow
from tests.unit.reduce.test_ddp import bytes_sent
from tests.worlds import run_distributed

WIDTH, NUM_BLOCKS, NUM_LANES = 256, 6, 4
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
P = (NUM_BLOCKS + 2) * BLOCK_BYTES
R = 2 * BLOCK_BYTES
"""Of the parameters that are in no block."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(hidden))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if inputs.any():
            for layer in self.layers:
                hidden = layer(hidden)
        return self.last(hidden)


def build(world, reducer: str, equality: str = "close") -> tuple[Blocks, Reducer]:
    torch.manual_seed(0)
    model = Blocks()
    config = DistributedConfig(reducer=reducer, equality=equality)
    return model, build_reducer(model, Placement.of(NUM_LANES, world), world, config)


@dataclass(frozen=True)
class Work:
    batch: LaneBatch

    def forward(self, model: nn.Module, data: torch.Tensor) -> Any:
        return model(data)

    def loss(self, outputs: torch.Tensor, _data: torch.Tensor) -> torch.Tensor:
        return outputs.square().sum()


def take_step(
    world, reducer: Reducer, value: Callable[[int], float] = lambda _lane: 1.0, void: Container[int] = ()
) -> None:
    blocks = lane_ranges(NUM_LANES, world.world_size)
    for turn in Schedule(NUM_LANES, NUM_LANES, 1).turns(blocks[world.rank], 0, 1):
        batch = LaneBatch(turn, (0,), torch.full((2, WIDTH), value(turn.lane)), 2)
        (loss,) = reducer.run([Work(batch)])
        reducer.backward(turn, None if turn.lane in void else loss, None)
    reducer.finish(1.0)


def bytes_of(tensors: Any) -> int:
    """Bytes of the storages in which this process has tensors, or its parts of them."""
    own = [one.to_local() if is_sharded(one) else one for one in tensors]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in own}.values())


def measure_held(world, reducer_name, equality):
    model, reducer = build(world, reducer_name, equality)
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(world, reducer)
    optimizer.step()
    states = [one for state in optimizer.state.values() for one in state.values() if one.dim()]
    held = [
        bytes_of(model.parameters()),
        bytes_of(parameter.grad for parameter in model.parameters()),
        bytes_of(states),
    ]
    reducer.close()
    return held


@pytest.mark.parametrize("equality", [*slow("close"), "exact"])
def test_four_processes_hold_a_quarter_of_parameters_gradients_and_optimizer_state(equality):
    for held in run_distributed(measure_held, 4, "fsdp", equality):
        assert held == [P // 4, P // 4, P // 2]
    for held in run_distributed(measure_held, 4, "ddp", equality):
        assert held == [P, P, 2 * P]


def measure_gathered(world):
    """Note how many bytes of gathered blocks there are in each forward and backward of a block."""
    model, reducer = build(world, "fsdp")
    gathered: dict[str, torch.Tensor] = {}
    activations: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(one.untyped_storage().nbytes() for one in gathered.values()))

    def before(_block: nn.Module, _inputs: Any) -> None:
        named = model.layers.named_parameters()
        gathered.update((name, one.data) for name, one in named if not is_sharded(one))
        look()

    def after(_block: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(look)
        activations.append(weakref.ref(output))

    for layer in model.layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    take_step(world, reducer)
    look()
    num_alive = sum(ref() is not None for ref in activations)
    reducer.close()
    return len(gathered), seen, num_alive


def test_one_block_is_gathered_in_a_forward_two_in_a_backward_and_nothing_stays():
    for num_gathered, seen, num_alive in run_distributed(measure_gathered, 2):
        assert num_gathered == 2 * NUM_BLOCKS
        *in_passes, at_the_end = [count / BLOCK_BYTES for count in seen]
        assert len(in_passes) == 2 * 2 * NUM_BLOCKS  # two lanes each
        for lane in (in_passes[: 2 * NUM_BLOCKS], in_passes[2 * NUM_BLOCKS :]):
            assert lane[:NUM_BLOCKS] == [1] * NUM_BLOCKS
            assert max(lane[NUM_BLOCKS:]) <= 2
        assert at_the_end == 0
        assert num_alive == 0


def measure_traffic(world, equality):
    _, reducer = build(world, "fsdp", equality)
    take_step(world, reducer)  # connects
    before = bytes_sent(world)
    for _ in range(10):
        take_step(world, reducer)
    sent = (bytes_sent(world) - before) / 10
    reducer.close()
    return sent


@pytest.mark.parametrize(("equality", "gradients"), [("exact", P), *slow(("close", 2 * P))])
def test_each_lane_gathers_weights_twice_and_sends_its_gradients(equality, gradients):
    """P for its forward, P - R again for its backward, and the gradients: half of it sent, on two processes.

    For a reduce-scatter gloo sends as much as for an all-reduce.
    """
    num_lanes_each = NUM_LANES // 2
    for sent in run_distributed(measure_traffic, 2, equality):
        assert sent == pytest.approx(num_lanes_each * (2 * P - R + gradients) / 2, rel=0.02)


def reduce_with_an_infinite_lane(world, reducer_name, equality):
    model, reducer = build(world, reducer_name, equality)
    used: set[str] = set()
    reducer.register_hooks(lambda name, one: used.add(name) if one.grad is not None else None)
    take_step(world, reducer, value=lambda lane: math.inf if lane == 1 else lane + 1.0, void={1})
    gradients = [whole(one.grad).clone() for one in model.parameters() if one.grad is not None]
    norm = float(torch.linalg.vector_norm(reducer.gradient_norms()))
    reducer.close()
    return gradients, norm, len(used)


@pytest.mark.parametrize("equality", ["exact", *slow("close")])
def test_nothing_travels_from_a_lane_without_weight_even_if_its_activations_are_infinite(equality):
    """Zero times infinity is NaN, in all blocks but the last: the weights were destroyed."""
    ((gradients, norm, num_used),) = run_distributed(reduce_with_an_infinite_lane, 1, "single", equality)
    assert math.isfinite(norm)
    for result in run_distributed(reduce_with_an_infinite_lane, 2, "fsdp", equality):
        torch.testing.assert_close(result[0], gradients)
        assert result[1] == pytest.approx(norm)
        assert result[2] == num_used == len(gradients)


def reduce_void_lanes_only(world):
    _, reducer = build(world, "fsdp")
    used: set[str] = set()
    reducer.register_hooks(lambda name, one: used.add(name) if one.grad is not None else None)
    take_step(world, reducer, void=range(NUM_LANES))
    reducer.close()
    return used


def test_a_lane_without_weight_uses_no_parameter():
    assert run_distributed(reduce_void_lanes_only, 2) == [set(), set()]


class Output(NamedTuple):
    hidden: torch.Tensor


@dataclass
class Answer:
    hidden: torch.Tensor


class Wrapping(Block):
    """Returns its output in a container of some kind."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, hidden: Any) -> Any:
        return self.wrap(super().forward(hidden))


class Wrapped(nn.Module):
    """Blocks that return a tensor, a tuple, a dict, a named tuple and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Wrapping(wrap)
            for wrap in (
                lambda one: one,
                lambda one: (one, 1),
                lambda one: {"hidden": [one]},
                Output,
                Answer,
            )
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        plain, pair, nested, named, data = self.layers
        hidden = nested(pair(plain(hidden))[0])["hidden"][0]
        answer: torch.Tensor = data(named(hidden).hidden).hidden
        return answer


def count_collectives(world):
    """Count what each lane starts, the first of which contributes nothing on rank 0."""
    torch.manual_seed(0)
    model = Wrapped()
    reducer = build_reducer(model, Placement.of(NUM_LANES, world), world, DistributedConfig(reducer="fsdp"))
    started: list[str] = []
    for name in (
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    ):
        if hasattr(dist, name):
            setattr(dist, name, _noting(getattr(dist, name), name, started))
    take_step(world, reducer, void={0})
    reducer.close()
    return started


def _noting(function: Callable[..., Any], name: str, started: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        started.append(name)
        return function(*args, **kwargs)

    return call


def test_blocks_are_reached_whatever_they_return():
    """A lane without weight must start what a lane with one starts, or the ranks wait for each other."""
    first, second = run_distributed(count_collectives, 2)
    assert first == second
    assert len(first) == 2 * (5 + 5 + 5)  # two lanes: gathered in the forward and the backward, and reduced


class Reentrant(Blocks):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        return self.last(hidden)


def run_reentrant(world):
    reducer = build_reducer(
        Reentrant(), Placement.of(NUM_LANES, world), world, DistributedConfig(reducer="fsdp")
    )
    with pytest.raises(TaskError, match=r"a Block is checkpointed with use_reentrant=True"):
        take_step(world, reducer)


def test_reentrant_checkpointing_is_an_error_and_no_hang():
    run_distributed(run_reentrant, 2)


def reduce_where_even_lanes_run_no_block(world, reducer_name):
    model, reducer = build(world, reducer_name, "exact")
    for _ in range(2):
        take_step(world, reducer, value=lambda lane: float(lane % 2) * lane)
        gradients = [whole(one.grad).numpy().tobytes() for one in model.parameters() if one.grad is not None]
        model.zero_grad()
    reducer.close()
    return gradients


def test_blocks_that_all_processes_leave_out_in_a_pass_keep_the_tree():
    """Of two lanes each, the first one runs no block: in the first step before FSDP knows of any gradient."""
    expected = run_distributed(reduce_where_even_lanes_run_no_block, 1, "single")
    for result in run_distributed(reduce_where_even_lanes_run_no_block, 2, "fsdp"):
        assert [result] == expected


class Experts(Blocks):
    """Runs one of its blocks, by what it is given."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers[int(inputs[0, 0])](self.first(inputs))


def choose_experts(world, choose):
    torch.manual_seed(0)
    reducer = build_reducer(
        Experts(), Placement.of(NUM_LANES, world), world, DistributedConfig(reducer="fsdp")
    )
    take_step(world, reducer, value=dict(enumerate(choose)).__getitem__)
    reducer.close()


def test_lanes_that_run_different_blocks_are_an_error():
    """The blocks are of one size: each rank would get a half of its own and a half of another one."""
    run_distributed(choose_experts, 2, (1.0, 2.0, 1.0, 2.0))  # alike on both ranks
    with pytest.raises(
        RuntimeError, match=r"TaskError: lanes ran different blocks of the model, rank \d layers"
    ):
        run_distributed(choose_experts, 2, (1.0, 2.0, 1.0, 3.0))


def call_often(world):
    model, reducer = build(world, "fsdp")
    with torch.no_grad():
        for _ in range(5):
            turn = next(Schedule(NUM_LANES, NUM_LANES, 1).turns(range(1), 0, 1))
            lanes = [Work(LaneBatch(turn, (0,), torch.ones(2, WIDTH), 2))]
            for _ in reducer.evaluate(model, lanes, 1, lambda lane, data: lane.forward(model, data)):
                pass
    group = model.layers[0]._get_fsdp_state()._fsdp_param_group
    num_noted = len(group.comm_ctx.post_forward_order) + len(group._post_forward_indices)
    are_sharded = [is_sharded(parameter) for parameter in model.parameters()]
    reducer.close()
    return num_noted, all(are_sharded)


def test_what_only_evaluates_gathers_nothing_for_long_and_notes_nothing_for_a_backward():
    assert run_distributed(call_often, 2) == [(0, True)] * 2


def is_freed(world):
    _, reducer = build(world, "fsdp", "exact")
    take_step(world, reducer)
    freed = weakref.ref(reducer)
    reducer.close()
    del reducer
    gc.collect()
    return freed() is None


def test_closing_it_takes_it_off_the_model():
    assert run_distributed(is_freed, 2) == [True, True]
