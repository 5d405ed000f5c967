"""Gradients that travel compressed: how far sums are from the true ones, what is sent, what is refused."""

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.config import DistributedConfig
from lanewise.device.determinism import set_determinism
from lanewise.engine.engine import build_engine
from lanewise.errors import TaskError
from lanewise.lanes import Placement, Schedule, lane_ranges
from lanewise.reduce import build_reducer, compression
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, configure, state_bytes
from tests.unit.reduce.lanes import reduce_lanes
from tests.unit.reduce.test_ddp import bytes_sent, gaussian

SIZES = [3, 1000, 300_000]  # more than DDP's first bucket of 1 MiB holds
ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def reduce_scaled(world, name: str, magnitude: float) -> list[torch.Tensor]:
    def value(lane: int, size: int) -> torch.Tensor:
        return magnitude * gaussian(lane, size)

    return reduce_lanes(world, value, SIZES, equality="close", num_lanes=6, compression=name)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
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


def reduce_matrices(world, name: str | None, num_steps: int, gradient: Any) -> tuple[list[Any], float]:
    """Reduce matrices of two buckets with PowerSGD from the third step on.

    Returns:
        The gradients of every step, and how many bytes the last one sent.
    """
    compression._NUM_WHOLE_STEPS = 2
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    reducer = build_reducer(model, Placement.of(4, world), world, DistributedConfig(compression=name))
    steps: list[Any] = []
    for turn in Schedule(4, 4, 1).turns(lane_ranges(4, world.world_size)[world.rank], 0, num_steps):
        if turn.is_last and turn.step == num_steps - 1:
            before = bytes_sent(world)
        loss = sum((one * gradient(turn, n, one.shape)).sum() for n, one in enumerate(model) if n != UNUSED)
        reducer.backward(turn, loss, None)
        if turn.is_last:
            reducer.finish(4.0)
            steps.append([one.grad.clone() for one in model])
            model.zero_grad()
    sent = bytes_sent(world) - before
    reducer.close()
    return steps, sent


SHAPES = [(600, 500), (400, 300), (30, 20), (7,)]
UNUSED = 2


def of_rank_one(turn, number: int, shape: Any) -> torch.Tensor:
    """The same left and right vectors in each lane, times the lane: PowerSGD can send that as it is."""
    generator = torch.Generator().manual_seed(number)
    vectors = [torch.randn(size, generator=generator) for size in shape]
    return (turn.lane + 1) * (torch.outer(*vectors) if len(vectors) == 2 else vectors[0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_powersgd_sends_a_matrix_of_rank_one_as_it_is(world_size):
    (alone, _), (steps, _), *others = [
        *run_distributed(reduce_matrices, 1, None, 4, of_rank_one),
        *run_distributed(reduce_matrices, world_size, "powersgd", 4, of_rank_one),
    ]
    for step, reference in zip(steps, alone, strict=True):
        for one, expected in zip(step, reference, strict=True):
            assert torch.allclose(one, expected, rtol=1e-3, atol=1e-3)
    assert not steps[-1][UNUSED].any()  # zeros, by whose norm PowerSGD divides
    assert all(torch.equal(a, b) for other, _ in others for a, b in zip(other[-1], steps[-1], strict=True))


def reduce_many_buckets(world) -> int:
    compression._NUM_WHOLE_STEPS = 2
    model = nn.ParameterList([nn.Parameter(torch.ones(600, 500)) for _ in range(90)])  # in buckets of 25 MiB
    reducer = build_reducer(model, Placement.of(2, world), world, DistributedConfig(compression="powersgd"))
    for turn in Schedule(2, 2, 1).turns(lane_ranges(2, world.world_size)[world.rank], 0, 5):
        reducer.backward(turn, sum(one.sum() for one in model), None)
        reducer.finish(2.0)
    reducer.close()
    return turn.step


@pytest.mark.slow
def test_powersgd_with_many_buckets_does_not_hang_on_gloo():
    """Each waits for collectives in a callback, and gloo has two threads for callbacks and collectives."""
    assert run_distributed(reduce_many_buckets, 2, one_machine=False) == [4, 4]


def of_rank_two(turn, number: int, shape: Any) -> torch.Tensor:
    return of_rank_one(turn, number, shape) + of_rank_one(turn, number + 10, shape) / 2


def test_powersgd_makes_up_for_what_it_left_out():
    """Step after step with the same gradient, the mean of what it leaves comes near to it."""
    (steps, _), _ = run_distributed(reduce_matrices, 2, "powersgd", 12, of_rank_two)
    whole, first, mean = steps[0][0], steps[2][0], sum(step[0] for step in steps[2:]) / len(steps[2:])
    assert (first - whole).norm() > 0.1 * whole.norm()
    assert (mean - whole).norm() < 0.3 * (first - whole).norm()


def test_less_is_sent():
    """On two processes of two machines; a float32 all-reduce sends about the bytes of the gradient."""
    whole, *compressed = (
        run_distributed(reduce_matrices, 2, name, 4, of_rank_two, one_machine=False)[0][1]
        for name in (None, "bf16", "fp16", "powersgd")
    )
    ratios = [sent / whole for sent in compressed]
    assert ratios == [
        pytest.approx(0.5, abs=0.03),
        pytest.approx(0.5, abs=0.03),
        pytest.approx(0.0, abs=0.03),
    ]


@pytest.mark.parametrize(
    ("name", "parameter", "said"),
    [
        ("bf16", torch.zeros(2, dtype=torch.complex64), "parameter 0 is complex"),
        ("fp16", torch.zeros(0, 2), "parameter 0 has no elements"),
        ("powersgd", torch.zeros(()), "parameter 0 is a scalar.* Give it the shape"),
    ],
)
def test_what_the_hooks_do_not_take_is_an_error(name, parameter, said):
    with pytest.raises(TaskError, match=said):
        compression._require_compressible(nn.ParameterList([nn.Parameter(parameter)]), name)
    frozen = nn.ParameterList([nn.Parameter(parameter, requires_grad=False)])
    compression._require_compressible(frozen, name)


def train(world, name: str | None, precision: str) -> Any:
    """Train with lanes that take turns, clipping, a parameter that some lanes use and one that none uses."""
    compression._NUM_WHOLE_STEPS = 2
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


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("name", "precision"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "float32"), ("powersgd", "bf16")]
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
    said, nothing = run_distributed(log_of, 2, "powersgd")
    assert "gradients travel compressed (powersgd): results are approximate" in said
    assert "PowerSGD begins after 1000 steps from here; its error feedback starts from zero" in said
    assert nothing == ""
    assert "PowerSGD" not in run_distributed(log_of, 2, "bf16")[0]
