"""Every path of an accelerator, on an emulated one: `exact` leaves the bytes of the CPU, in every order.

The orders are those in which the device runs what was launched on several streams, see tests/fake_device.
"""

import itertools
import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from lanewise.config import DataConfig, DistributedConfig, FSDPConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.errors import TaskError
from lanewise.processes.device.determinism import set_determinism
from lanewise.testing import run_distributed
from tests.distributed.reduce.test_reducers import Whole, train_part
from tests.distributed.tasks import Language, configure, train
from tests.fake_device.build import why_not
from tests.fake_device.device import DEVICE, ORDERS
from tests.fake_device.run import run
from tests.fake_device.tasks import DrawsOnTheHost, Pictures, RunsAgainAtOnce, Twice, Wide, Words
from tests.slow import slow

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),  # the first test builds the device
]

LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "data_parallel": ("data_parallel", 2),
    "balanced_data_parallel": ("balanced_data_parallel", 2),
}
PRECISIONS = ("float32", "bf16", "fp16")
NUM_STEPS = 6


def configured(
    task: type[Any],
    layout: str,
    precision: str = "float32",
    equality: str = "exact",
    device_type: str = DEVICE,
    num_workers: int = 0,
) -> RunConfig:
    reducer, devices = LAYOUTS[layout]
    distributed = DistributedConfig(
        fsdp=FSDPConfig(blocks=("Conv2d",) if task is Pictures else ("TransformerEncoderLayer",)),
        reducer=reducer,  # type: ignore[arg-type]
        devices=devices,
        device_type=device_type,
        equality=equality,  # type: ignore[arg-type]
    )
    config = configure(task, precision=precision, steps=NUM_STEPS)  # type: ignore[arg-type]
    return replace(config, distributed=distributed, data=DataConfig(num_workers=num_workers))


@cache
def on_cpu(task: type[Any], precision: str = "float32") -> Any:
    (ended,) = run_distributed(train, 1, configured(task, "single", precision, device_type="cpu"))
    return ended


def on_device(config: RunConfig, order: str = "now", function: Any = train, *args: Any) -> Any:
    ended = run(function, config.distributed.num_processes or 1, config, *args, order=order)
    assert all(one.value == ended[0].value for one in ended)
    return ended[0].value


FAST = {
    (Pictures, "single", "fp16", "last"),
    (Language, "ddp", "bf16", "last"),
    (Whole, "fsdp", "float32", "side_first"),
    (Whole, "data_parallel", "float32", "last"),
    (Language, "balanced_data_parallel", "bf16", "side_first"),
}
"""What `make test` runs: among it, every layout, task and precision, in two orders."""


def product() -> list[Any]:
    """Each task with each layout and precision, in two orders."""
    cases = itertools.product((Pictures, Language, Whole), LAYOUTS, PRECISIONS, ("last", "side_first"))
    return [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("task", "layout", "precision", "order"), product())
def test_exact_leaves_the_bytes_of_the_cpu(task, layout, precision, order):
    assert on_device(configured(task, layout, precision), order) == on_cpu(task, precision)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS[2:])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_order_leaves_the_same_bytes(layout, order):
    assert on_device(configured(Whole, layout, num_workers=2), order) == on_cpu(Whole)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_close_is_near(layout, precision):
    state, losses = on_device(configured(Whole, layout, precision, equality="close"), "last")
    _, expected = on_cpu(Whole, precision)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert state


@pytest.mark.parametrize("layout", ["single", *slow("ddp")])
def test_workers_that_load_change_no_byte(layout):
    assert on_device(configured(Pictures, layout, num_workers=2), "last") == on_cpu(Pictures)


@pytest.mark.parametrize(
    ("saved", "resumed"), [("ddp", "single"), *slow(("fsdp", "data_parallel"), ("single", "fsdp"))]
)
def test_training_goes_on_in_another_layout(tmp_path, saved, resumed):
    expected, _ = on_cpu(Whole)
    on_device(configured(Whole, saved), "last", train_part, str(tmp_path), 3)
    assert on_device(configured(Whole, resumed), "last", train_part, str(tmp_path), NUM_STEPS) == expected


@pytest.mark.slow
def test_training_goes_on_on_the_cpu_in_close_only(tmp_path):
    on_device(configured(Pictures, "ddp"), "last", train_part, str(tmp_path / "exact"), 3)
    on_device(configured(Pictures, "ddp", equality="close"), "last", train_part, str(tmp_path / "close"), 3)
    config = configured(Pictures, "single", device_type="cpu")
    with pytest.raises(RuntimeError, match="'gpu': 'emulated accelerator'"):
        run_distributed(train_part, 1, config, str(tmp_path / "exact"), NUM_STEPS)
    config = configured(Pictures, "single", device_type="cpu", equality="close")
    (ended,) = run_distributed(train_part, 1, config, str(tmp_path / "close"), NUM_STEPS)
    assert ended.keys() == on_cpu(Pictures)[0].keys()


@pytest.mark.parametrize("layout", ["data_parallel", *slow("balanced_data_parallel")])
def test_a_lane_that_leaves_autocast_discards_no_cast_of_another(layout):
    assert on_device(configured(Twice, layout, "bf16")) == on_cpu(Twice, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data_parallel", "balanced_data_parallel"])
def test_forwards_that_run_again_at_once_are_no_draws(layout):
    """Both put back the state of torch's generator, and what is left was taken for a draw of the backward."""
    assert on_device(configured(RunsAgainAtOnce, layout)) == on_cpu(RunsAgainAtOnce)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data_parallel", "balanced_data_parallel"])
def test_lanes_at_once_that_draw_from_a_generator_of_the_host_are_an_error(layout):
    """They left other bytes than a single device, and others in each run, without a word."""
    with pytest.raises(RuntimeError, match="drew random numbers from python's generator"):
        on_device(configured(DrawsOnTheHost, layout))


def use_after_fork(world):
    """Use the device, and again in a fork; return the fork's exit code."""
    used = torch.ones(2, device=world.device) + 1
    child = os.fork()
    if not child:
        is_in_use = getattr(torch, DEVICE).is_initialized()
        with pytest.raises(RuntimeError, match="Cannot re-initialize"):
            torch.ones(2, device=world.device)
        os._exit(is_in_use)
    return os.waitpid(child, 0)[1], used.tolist()


def test_a_fork_of_a_process_that_used_a_device_can_use_none():
    assert run(use_after_fork, 1)[0].value == (0, [2.0, 2.0])


def count_waits(world, config):
    """Train without a look at the reports; return the calls that waited in each step."""
    set_determinism(config.distributed.equality, threads=1)
    module = getattr(torch, DEVICE)
    counted = []
    before = module.waits()
    for _ in build_engine(config, world).steps():
        now = module.waits()
        counted.append({kind: now[kind] - before[kind] for kind in now if now[kind] > before[kind]})
        before = now
    return counted


def train_with_memory(world, config, num_bytes):
    """Train on a device with so much memory; return what was said where that is too little."""
    getattr(torch, DEVICE).set_memory_limit(world.device.index, num_bytes)
    with pytest.raises(TaskError) as caught:
        train(world, config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("num_weights", "said"),
    [
        *slow(
            (0.5, "out of memory for the weights. Share them out: "),
            (1.5, "out of memory with a micro-batch of 2 samples ([2, "),
        ),
        (2.5, "out of memory for the update by AdamW. Share out what it keeps"),
    ],
)
def test_out_of_memory_is_an_error_with_remedies(num_weights, said):
    """It was torch's own in the model, in the looks of the first step, in copies and in the optimizer."""
    config = configure(Wide, num_lanes=1, steps=2)
    (ended,) = run(train_with_memory, 1, config, int(num_weights * 2**19), order="last")
    assert ended.value.startswith(said)
    assert "distributed.reducer=fsdp" in ended.value
    assert "The error was OutOfMemoryError: emulated out of memory. Tried to allocate" in ended.value


STEADY = {("single", "exact"), ("ddp", "exact"), ("balanced_data_parallel", "close")}


@pytest.mark.parametrize(
    ("layout", "equality", "precision"),
    [
        pytest.param(*case, "float32", marks=() if case in STEADY else pytest.mark.slow)
        for case in itertools.product(LAYOUTS, ("exact", "close"))
    ]
    + slow(*((layout, "exact", "fp16") for layout in LAYOUTS)),
)
def test_a_steady_step_does_not_wait(layout, equality, precision):
    config = configured(Words, layout, precision, equality)
    config = replace(
        config,
        log=replace(config.log, every_steps=100),
        distributed=replace(config.distributed, fsdp=FSDPConfig(blocks=("Layer",))),
    )
    # For the losses, under fsdp for whether all ranks ran the same blocks, in fp16 for the norm.
    waits = {"event": 1 + (layout == "fsdp") + (precision == "fp16")}
    for ended in run(count_waits, config.distributed.num_processes or 1, config, order="last"):
        assert ended.value[2:-1] == [waits] * (NUM_STEPS - 3), ended.value
