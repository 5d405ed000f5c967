"""The reducer of several processes: what it adds in which order, when, and what it sends."""

import gc
import os
import random
import socket
import struct
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lanewise.config import DistributedConfig
from lanewise.lanes import Placement, Schedule, lane_ranges
from lanewise.reduce import build_reducer, tree_all_reduce
from lanewise.testing import run_distributed
from tests.slow import slow
from tests.unit.reduce.lanes import cancelling, in_tree, reduce_lanes

SIZES = [3, 1, 1000, 5, 300_000, 2]  # more than DDP's first bucket of 1 MiB holds


def as_bytes(tensors):
    return [tensor.numpy().tobytes() for tensor in tensors]


def reduce_exact(world, num_lanes, present):
    return as_bytes(
        reduce_lanes(world, cancelling, SIZES, equality="exact", num_lanes=num_lanes, present=present)
    )


LANES = [(4, range(4)), (8, range(8)), (8, range(3)), (7, range(7)), (6, range(2)), (7, (1, 2, 5)), (8, (6,))]
"""How many there are, and which of them have samples."""


def reduce_each(world):
    """Reduce for each number of lanes in one world: starting one takes longer."""
    return [reduce_exact(world, num_lanes, present) for num_lanes, present in LANES]


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
def test_exact_adds_in_the_tree_whoever_carries_the_lanes(world_size):
    expected = [as_bytes(in_tree(cancelling, SIZES, *lanes)) for lanes in LANES]
    for result in run_distributed(reduce_each, world_size):
        assert result == expected


def used_by_odd_lanes(lane, size):
    """The parameter of 5 elements is used by odd lanes only, the one of 2 by none; zeros are negative."""
    if size == 2 or (size == 5 and lane % 2 == 0):
        return None
    return torch.full((size,), -0.0) if size == 3 else cancelling(lane, size)


def reduce_partly_used(world, equality):
    return as_bytes(reduce_lanes(world, used_by_odd_lanes, SIZES, equality=equality, num_lanes=6))


@pytest.mark.parametrize("world_size", [1, 3, *slow(2, 4, 6)])
def test_a_parameter_that_some_lanes_or_none_use_gets_the_same_bytes(world_size):
    expected = as_bytes(in_tree(used_by_odd_lanes, SIZES, 6, range(6)))
    for result in run_distributed(reduce_partly_used, world_size, "exact"):
        assert result == expected


def test_close_gives_zeros_where_no_lane_uses_a_parameter():
    for result in run_distributed(reduce_partly_used, 2, "close"):
        assert result[SIZES.index(2)] == bytes(8)


def unlike(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reduce_unlike(world, equality):
    """Reduce, in three lanes, parameters of many layouts and dtypes; each element has another gradient."""
    parameters = [
        nn.Parameter(torch.zeros(5, 4).t()),
        nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(8, 6)[::2, 1:4]),
        nn.Parameter(torch.zeros(8, 6).t()[::2]),
        nn.Parameter(torch.zeros(4, 1, 5).permute(2, 1, 0)),
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(0, 3)),
        nn.Parameter(torch.zeros(4, 3, dtype=torch.complex64).t()),
        nn.Parameter(torch.zeros((), dtype=torch.complex64)),
        nn.Parameter(torch.zeros(0, dtype=torch.complex64)),
        nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16).t()),
    ]
    model = nn.ParameterList(parameters)
    reducer = build_reducer(model, Placement.of(3, world), world, DistributedConfig(equality=equality))
    for turn in Schedule(3, 3, 1).turns(lane_ranges(3, world.world_size)[world.rank], 0, 2):
        # Lane 1 does not use the sliced ones.
        used = [(n, p) for n, p in enumerate(model) if turn.lane != 1 or n not in (2, 3)]
        products = [(p * unlike(p.shape, 10 * turn.lane + n)).sum() for n, p in used]
        loss = sum(p.real - 3 * p.imag if p.is_complex() else p for p in products)
        reducer.backward(turn, loss, None)
        if turn.is_last:
            reducer.finish(1.0)
            norm = torch.linalg.vector_norm(reducer.gradient_norms())
            gradients = [parameter.grad.clone() for parameter in model]
            model.zero_grad()
    reducer.close()
    return [*gradients, norm], [gradient.stride() for gradient in gradients]


@pytest.mark.parametrize("equality", [*slow("close"), "exact"])
def test_gradients_of_parameters_of_any_layout_and_dtype_are_those_of_one_process(equality):
    (alone,) = run_distributed(reduce_unlike, 1, equality)
    for world_size in (2, 3):
        for gradients, strides in run_distributed(reduce_unlike, world_size, equality):
            assert strides == alone[1]
            same = torch.equal if equality == "exact" else partial(torch.allclose, rtol=0.05, atol=0.05)
            assert all(map(same, gradients, alone[0]))


def gaussian(lane, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(lane * 7 + size)) * 10.0 ** (lane % 3)


def reduce_close(world, num_lanes):
    return reduce_lanes(world, gaussian, SIZES, equality="close", num_lanes=num_lanes)


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
def test_close_keeps_its_bound_in_every_element(world_size):
    num_lanes = 8
    unit_roundoff = 2.0**-24
    gamma = (num_lanes - 1) * unit_roundoff / (1 - (num_lanes - 1) * unit_roundoff)
    alone = run_distributed(reduce_close, 1, num_lanes)[0]
    for result in run_distributed(reduce_close, world_size, num_lanes):
        for size, reduced, reference in zip(SIZES, result, alone, strict=True):
            magnitude = sum(gaussian(lane, size).abs().double() for lane in range(num_lanes))
            difference = (reduced.double() - reference.double()).abs()
            assert (difference <= 2 * gamma * magnitude).all()


def reduce_with_delays(world, num_lanes):
    """Delay each stage of each bucket at random, differently on each rank."""
    delays = random.Random(world.rank)
    for module, name in ((dist, "all_to_all_single"), (tree_all_reduce, "all_gather_single")):
        collective = getattr(module, name)

        def delayed(*args, collective=collective, **kwargs):
            time.sleep(delays.random() * 0.02)
            return collective(*args, **kwargs)

        setattr(module, name, delayed)
    return as_bytes(reduce_lanes(world, cancelling, SIZES, equality="exact", num_lanes=num_lanes, steps=12))


@pytest.mark.parametrize("world_size", [*slow(2), 4])
def test_random_delays_neither_hang_nor_change_a_byte(world_size):
    expected = as_bytes(in_tree(cancelling, SIZES, 5, range(5)))
    for result in run_distributed(reduce_with_delays, world_size, 5):
        assert result == expected


class WaitInBackward(torch.autograd.Function):
    """The identity, whose backward waits for an event."""

    @staticmethod
    def forward(ctx, tensor, event):
        ctx.event = event
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.event.wait(timeout=60), "no collective began during backward"
        return gradient, None


def reduce_behind_a_gate(world):
    """Hold the backward of the first layer until the first collective of the step has begun."""
    begun = threading.Event()
    all_to_all_single = dist.all_to_all_single

    def note(*args, **kwargs):
        begun.set()
        return all_to_all_single(*args, **kwargs)

    dist.all_to_all_single = note
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)])  # 1.4 MB each
    reducer = build_reducer(model, Placement.of(4, world), world, DistributedConfig(equality="exact"))
    for turn in Schedule(4, 4, 1).turns(lane_ranges(4, world.world_size)[world.rank], 0, 3):
        if turn.is_last:
            begun.clear()

        def compute_loss(is_gated=turn.is_last and turn.step > 0):  # DDP has one bucket in its first step
            hidden = model[0](torch.ones(2, 600))
            if is_gated:
                hidden = WaitInBackward.apply(hidden, begun)
            return model[1:](hidden).sum()

        reducer.backward(turn, compute_loss(), None)
        if turn.is_last:
            reducer.finish(1.0)
            model.zero_grad()
    reducer.close()
    return True


def test_the_first_bucket_travels_before_the_last_gradient_exists():
    assert run_distributed(reduce_behind_a_gate, 2, one_machine=False) == [True, True]


def bytes_sent(world) -> int:
    """Bytes that the TCP sockets of this process have sent: tcpi_bytes_sent of Linux's struct tcp_info."""
    world.all_gather_tree(None)  # when all have come here, they have what was sent before
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            copy = os.dup(int(descriptor.name))
            with socket.socket(fileno=copy) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                    total += struct.unpack_from("Q", info, 200)[0]
        except OSError:
            continue  # no socket
    world.all_gather_tree(None)  # a rank that leaves hangs up on one that still looks at its sockets
    return total


def measure_traffic(world, num_lanes):
    sizes = [300_000, 700_000, 1_000_001]
    reduce_lanes(world, cancelling, [10], equality="exact", num_lanes=num_lanes)  # connects
    before = bytes_sent(world)
    reduce_lanes(world, cancelling, sizes, equality="exact", num_lanes=num_lanes, steps=3)
    return (bytes_sent(world) - before) / (3 * 4 * sum(sizes))


@pytest.mark.parametrize("num_lanes", [2, *slow(8, 30)])
def test_exact_sends_about_as_much_as_a_ring_all_reduce(num_lanes):
    """On two processes each sends half of the gradient in either stage, for any number of lanes."""
    for ratio in run_distributed(measure_traffic, 2, num_lanes, one_machine=False):
        assert 0.95 < ratio < 1.1


def is_freed(world, equality):
    """DDP holds its hook, the hook the reducer, the reducer DDP; then a process could abort at its end."""
    torch.manual_seed(0)
    reducer = build_reducer(
        nn.Linear(2, 2), Placement.of(2, world), world, DistributedConfig(equality=equality)
    )
    freed = weakref.ref(reducer)
    reducer.close()
    del reducer
    gc.collect()
    return freed() is None


@pytest.mark.parametrize("equality", ["exact", "close"])
def test_closing_it_breaks_the_cycle_through_ddp(equality):
    assert run_distributed(is_freed, 2, equality) == [True, True]
