"""What else a run may hold, on the emulated accelerator: `exact` leaves the bytes of the CPU."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lanewise.commands.bench.job import LEAST_ROUNDS
from lanewise.commands.jobs.train import TrainJob
from lanewise.commands.plan.formulas import peak_memory
from lanewise.commands.plan.measure import largest_batch, measure
from lanewise.commands.plan.memory import Setting
from lanewise.commands.verify.evidence import LayoutResult
from lanewise.commands.verify.job import VerifyJob
from lanewise.config import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    DistributedConfig,
    EvaluateConfig,
    EveryConfig,
    FSDPConfig,
    LogConfig,
    MemoryConfig,
    RunConfig,
)
from lanewise.config.class_path import add_search_path
from lanewise.data import LaneBatch
from lanewise.processes.device.determinism import set_determinism
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed import kinds
from tests.distributed.commands.test_bench import measure as turns
from tests.distributed.commands.test_plan import load_example, train_and_measure
from tests.distributed.contrastive import ByRows, Contrastive
from tests.distributed.engine.test_activation_checkpointing import Checkpointed
from tests.distributed.engine.test_kinds import _UNDER_REPLICAS, RIGHT, own_loop, train_each
from tests.distributed.engine.test_loss_metrics import Reporting
from tests.distributed.engine.test_several_losses import TwoLosses
from tests.distributed.streams import Streaming
from tests.distributed.tasks import configure
from tests.fake_device.build import why_not
from tests.fake_device.device import DEVICE
from tests.fake_device.run import run
from tests.fake_device.tasks import Words

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),  # the first test builds the device
    pytest.mark.slow,
]

LAYOUTS = {
    "single": DistributedConfig(reducer="single", devices=1),
    "ddp": DistributedConfig(reducer="ddp", devices=3, shard_optimizer=True),
    "fsdp": DistributedConfig(reducer="fsdp", devices=2),
    "data_parallel": DistributedConfig(reducer="data_parallel", devices=2),
    "balanced_data_parallel": DistributedConfig(reducer="balanced_data_parallel", devices=3),
}
CPU = DistributedConfig(reducer="single", devices=1, device_type="cpu", equality="exact")


def on(layout: str, config: RunConfig, *blocks: str) -> RunConfig:
    """Return a run as it is on the emulated device in a layout."""
    section = replace(LAYOUTS[layout], device_type=DEVICE, equality="exact", fsdp=FSDPConfig(blocks=blocks))
    return replace(config, distributed=section)


CHECKPOINTED, OFFLOADED = "activation checkpointing", "activation checkpointing, offloaded"
LEFT_OUT = {
    # Tensors of the task's own, which nobody moves to a device.
    *(kinds.QueueInLoss, kinds.CentreOfWholeStep, kinds.TeacherWithStatistics, kinds.FrozenCriterion),
    kinds.OldWeightNorm,  # torch cannot move its parameters to a device that it does not ship
}
IN_PROCESS = ("data_parallel", "balanced_data_parallel")
LEFT_OUT_IN_PROCESS = {
    *_UNDER_REPLICAS,
    kinds.StatisticsInLoss,
}  # which keeps the module of one lane in its task


def features(layout: str) -> dict[str, RunConfig]:
    """A run for each feature that a layout has, but for those of `run_job`."""
    blocks = ("TransformerEncoderLayer",)
    checkpointing = ActivationCheckpointingConfig()
    offload = replace(checkpointing, offload=True)
    checkpointed = configure(Checkpointed, num_lanes=5, steps=4, num_samples=43)
    found = {
        "several terms": on(layout, configure(TwoLosses), *blocks),
        "several terms, fp16": on(layout, configure(TwoLosses, precision="fp16"), *blocks),
        "stream": on(layout, configure(Streaming), *blocks),
        "batch_loss": on(layout, configure(Contrastive, loss="clip"), "Linear"),
        "row_loss": on(layout, configure(ByRows, loss="clip"), "Linear"),
    }
    if layout in ("single", "ddp"):  # the blocks use python's generator, which lanes that run at once share
        found |= {
            name: on(layout, replace(checkpointed, memory=MemoryConfig(activation_checkpointing=section)))
            for name, section in ((CHECKPOINTED, checkpointing), (OFFLOADED, offload))
        }
    for task in (task for task in RIGHT if task not in LEFT_OUT):
        if layout not in IN_PROCESS or task not in LEFT_OUT_IN_PROCESS:
            config = configure(task, num_lanes=4, steps=6, optimizer="torch.optim.SGD", lr=0.1)
            found[task.__name__] = on(layout, config)
    return found


@cache
def features_on_cpu() -> dict[str, Any]:
    on_device = features("single")
    on_device[OFFLOADED] = on_device[CHECKPOINTED]  # which there is on an accelerator only
    configs = {name: replace(config, distributed=CPU) for name, config in on_device.items()}
    (found,) = run_distributed(train_each, 1, list(configs.values()))
    return dict(zip(configs, found, strict=True))


@pytest.mark.parametrize("order", ["last", "random-1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_feature_leaves_the_bytes_of_the_cpu(layout, order):
    configs = features(layout)
    num_processes = LAYOUTS[layout].num_processes or 1
    for ended in run(train_each, num_processes, list(configs.values()), order=order):
        for name, found in zip(configs, ended.value, strict=True):
            assert found == features_on_cpu()[name], f"{name}: {found if isinstance(found, str) else ''}"


@pytest.mark.parametrize("num_processes", [1, 3])
def test_an_own_loop_leaves_the_bytes_of_the_cpu(num_processes):
    for kind in (kinds.Plain, kinds.Statistics):
        (expected,) = run_distributed(own_loop, 1, kind)
        for ended in run(own_loop, num_processes, kind, order="random-0"):
            assert ended.value == expected


def whole_run(run_dir: Path, num_steps: int = 6) -> RunConfig:
    """A run with metrics, evaluations, an average, checkpoints while training goes on, and a profile."""
    config = configure(Reporting, num_lanes=4, log_every_steps=2)
    return replace(
        config,
        train=replace(
            config.train, run_dir=str(run_dir), max_steps=num_steps, ema_decay=0.9, profile_steps=(2, 3)
        ),
        log=LogConfig(every_steps=2),
        evaluate=EvaluateConfig(every_steps=2, best="held_out/loss", best_mode="min"),
        checkpoint=CheckpointConfig(every=EveryConfig(steps=1), keep_last=3, keep_best=1),
    )


def run_job(world: Any, config: RunConfig, **options: Any) -> Any:
    """Train from start to end in this process of the world; return the result and what was written."""
    set_determinism("exact", threads=1)
    job = TrainJob(config, **options)
    with job.claim() if world.rank == 0 else nullcontext():
        result = job.run(world)
    run_dir = RunDir(Path(config.train.run_dir))
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    metrics = [
        {name: value for name, value in line.items() if not name.startswith(("perf/", "time", "memory/"))}
        for line in lines
    ]
    del result["run_dir"]
    return result, metrics, run_dir.model.read_bytes(), any(run_dir.profile.iterdir())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_run_leaves_the_files_of_the_cpu(tmp_path, layout):
    on_cpu = replace(whole_run(tmp_path / "cpu"), distributed=CPU)
    (expected,) = run_distributed(run_job, 1, on_cpu)
    config = on(layout, whole_run(tmp_path / "device"), "TransformerEncoderLayer")
    for ended in run(run_job, LAYOUTS[layout].num_processes or 1, config, order="random-2"):
        assert ended.value == expected


def verify_alone(world: Any, job: VerifyJob) -> Any:
    """Run what `lanewise verify` runs in a layout."""
    set_determinism("exact", threads=1)
    return job.run(world)


def test_verify_finds_the_layouts_equal(tmp_path):
    layouts = []
    for number, layout in enumerate(("single", "ddp", "fsdp")):
        config = on(layout, configure(TwoLosses, steps=3), "TransformerEncoderLayer")
        job = VerifyJob(
            config, folder=tmp_path, name=layout, num_steps=2, judges_close=True, is_reference=not number
        )
        ended = run(verify_alone, LAYOUTS[layout].num_processes or 1, job, order="last")
        layouts.append(LayoutResult(layout, ended[0].value, failure=ended[0].value[0].error))
        layouts[-1].compare_with(layouts[0])
        assert not layouts[-1].failure
        assert layouts[-1].trace.steps
        assert not layouts[-1].differences


@pytest.mark.parametrize("layout", ["single", "ddp"])
def test_bench_measures_the_device(layout):
    config = on(layout, configure(Words, num_lanes=4, steps=20))
    firsts, rounds = run(turns, LAYOUTS[layout].num_processes or 1, config, order="last")[0].value
    assert len({first.model for first in firsts}) == 1
    assert all(turn.seconds > 0 for each in rounds for turn in each)
    assert len(rounds) == LEAST_ROUNDS


def most_bytes(world: Any, config: RunConfig, batch: LaneBatch) -> int:
    """Train, and return the most bytes that tensors held on the device."""
    train_and_measure(world, config, batch)
    return torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize("reducer", ["single", "ddp", "fsdp", "data_parallel", "balanced_data_parallel"])
def test_plan_says_what_the_device_holds(reducer):
    """Of several devices the first one, which needs most."""
    num_devices = 1 if reducer == "single" else 2
    config = load_example("mnist", **{"distributed.reducer": reducer, "distributed.devices": num_devices})
    add_search_path(config.search_path)
    batch = largest_batch(config)
    on_device = replace(config, distributed=replace(config.distributed, device_type=DEVICE))
    num_processes = on_device.distributed.num_processes or 1
    ended = run(most_bytes, num_processes, on_device, batch, order="now")
    setting = Setting(reducer=reducer, num_devices=num_devices, num_lanes=config.batch.num_lanes)
    measured = replace(measure(config, batch, "cpu"), shares_memory=False)  # each device has its own
    planned = peak_memory(measured, setting).num_bytes
    assert planned == pytest.approx(ended[0].value, rel=0.1)
