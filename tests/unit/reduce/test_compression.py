"""Gradients that travel compressed: how far sums are from the true ones, what is sent, what is refused."""

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.config import DistributedConfig
from lanewise.engine.engine import build_engine
from lanewise.errors import TaskError
from lanewise.lanes import Placement, Schedule, lane_ranges
from lanewise.processes.device.determinism import set_determinism
from lanewise.reduce import build_reducer, compression
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, configure, state_bytes
from tests.slow import slow
from tests.unit.reduce.lanes import reduce_lanes
from tests.unit.reduce.test_ddp import bytes_sent, gaussian

SIZES = [3, 1000, 300_000]  # more than DDP's first bucket of 1 MiB holds
ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def reduce_scaled(world, name: str, magnitude: float) -> list[torch.Tensor]:
    def value(lane: int, size: int) -> torch.Tensor:
        return magnitude * gaussian(lane, size)

    return reduce_lanes(world, value, SIZES, equality="close", num_lanes=6, compression=name)


@pytest.mark.parametrize(("name", "world_size"), [("bf16", 3), ("fp16", 2), *slow(("bf16", 2), ("fp16", 3))])
def test_a_rounded_sum_is_as_near_as_its_format_in_any_unit(name, world_size):
    """Sums over many tokens are beyond fp16, small gradients below it: they are scaled before the cast."""
    for magnitude in (1e9, 1e-9):
        results = run_distributed(reduce_scaled, world_size, name, magnitude)
        for size, *sums in zip(SIZES, *results, strict=True):
            terms = [magnitude * gaussian(lane, size).double() for lane in range(6)]
            differences = (sums[0].double() - sum(terms)).abs()
            # Rounded for the way, divided by the processes, and added with the others.
            bound = (world_size + 2) * ROUNDOFF[name] * sum(term.abs() for term in terms)
            # What is small beside the largest of its bucket has fewer digits in fp16, and is not lost.
            bound += 2.0**-23 * world_size * sum(term.abs().max() for term in terms)
            assert (differences <= bound).all()
            assert differences.any()  # it was rounded
            assert all(torch.equal(one, sums[0]) for one in sums)


def reduce_overflow(world) -> list[bool]:
    def value(lane: int, size: int) -> torch.Tensor:
        return torch.full((size,), {1: torch.inf, 2: torch.nan}.get(lane, 1.0) if size == 3 else 1.0)

    overflowed, _ = reduce_lanes(world, value, [3, 4], equality="close", num_lanes=4, compression="fp16")
    return [bool(overflowed.isfinite().any())]


def test_what_is_not_finite_stays_so_for_the_loss_scale_to_see():
    assert run_distributed(reduce_overflow, 2) == [[False]] * 2


SHAPES = [(600, 500), (400, 300), (30, 20), (7,)]


def bytes_of_a_step(world, name: str | None) -> int:
    """Return how many bytes the last of four steps sends: DDP rebuilds its buckets after the first."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    reducer = build_reducer(model, Placement.of(4, world), world, DistributedConfig(compression=name))
    for turn in Schedule(4, 4, 1).turns(lane_ranges(4, world.world_size)[world.rank], 0, 4):
        if turn.is_last and turn.step == 3:
            before = bytes_sent(world)
        reducer.backward(turn, sum(one.sum() for one in model), None)
        if turn.is_last:
            reducer.finish(4.0)
            model.zero_grad()
    sent = bytes_sent(world) - before
    reducer.close()
    return sent


def test_less_is_sent():
    """On two processes of two machines; a float32 all-reduce sends about the bytes of the gradient."""
    whole, *compressed = (
        run_distributed(bytes_of_a_step, 2, name, one_machine=False)[0] for name in (None, "bf16", "fp16")
    )
    assert [sent / whole for sent in compressed] == [pytest.approx(0.5, abs=0.03)] * 2


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (torch.zeros(2, dtype=torch.complex64), "parameter 0 is complex"),
        (torch.zeros(0, 2), "parameter 0 has no elements"),
    ],
)
def test_what_the_hooks_do_not_take_is_an_error(parameter, said):
    with pytest.raises(TaskError, match=said):
        compression._require_compressible(nn.ParameterList([nn.Parameter(parameter)]))
    frozen = nn.ParameterList([nn.Parameter(parameter, requires_grad=False)])
    compression._require_compressible(frozen)


def train(world, name: str | None, precision: str) -> Any:
    """Train with lanes that take turns, clipping, a parameter that some lanes use and one that none uses."""
    config = configure(Language, equality="close", precision=precision)
    distributed = replace(config.distributed, compression=name, shard_optimizer=True)
    set_determinism("close", threads=1)
    engine = build_engine(replace(config, distributed=distributed), world)
    losses = [report.totals.loss for report in engine.steps()]
    return losses, state_bytes(engine.training.model)


@cache
def losses_uncompressed(precision: str) -> list[float]:
    losses, _ = run_distributed(train, 1, None, precision)[0]
    return losses


@pytest.mark.parametrize("world_size", [*slow(2), 3])
@pytest.mark.parametrize(
    ("name", "precision"), [("bf16", "bf16"), *slow(("fp16", "fp16"), ("fp16", "float32"))]
)
def test_training_is_near_on_every_rank_alike_and_totals_are_exact(name, precision, world_size):
    expected = losses_uncompressed(precision)
    (losses, state), *others = run_distributed(train, world_size, name, precision)
    assert losses[0] == expected[0]
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.1)
    assert all(other == (losses, state) for other in others)


def log_of(world, name: str) -> str:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lanewise").addHandler(handler)
    logging.getLogger("lanewise").setLevel(logging.INFO)
    build_reducer(nn.Linear(2, 2), Placement.of(2, world), world, DistributedConfig(compression=name)).close()  # type: ignore[arg-type]
    return "\n".join(lines)


def test_it_is_said_to_be_approximate_by_one_rank():
    said, nothing = run_distributed(log_of, 2, "bf16")
    assert "gradients are sent compressed (bf16): results are approximate" in said
    assert nothing == ""
