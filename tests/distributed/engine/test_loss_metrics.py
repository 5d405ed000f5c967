"""What losses report: the same on any number of processes and devices, also after a resume."""

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lanewise import Loss
from lanewise.config import CheckpointConfig, DistributedConfig, EveryConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.runs.test_log import fit, lines_of
from tests.distributed.tasks import Language, Sentences, configure
from tests.slow import slow

NAMES = ("confidence", "even", "odd")


class Reporting(Language):
    """Each lane reports its confidence, and another name for each parity of its first token."""

    noted: list[dict[str, tuple[float, float]]] | None = None

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": Sentences(11)}

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        confidence = outputs.softmax(-1).amax(-1).sum()
        parity = ("even", "odd")[int(batch[0, 0]) % 2]
        metrics = {"confidence": (confidence, batch.numel()), parity: (loss.sum, loss.weight)}
        if self.noted is not None:
            pairs = {name: (value.item(), float(weight)) for name, (value, weight) in metrics.items()}
            self.noted.append(pairs)
        return dataclasses.replace(loss, metrics=metrics)


def reporting(every_steps: int = 5, reducer: str = "ddp", **changes: Any) -> RunConfig:
    """23 steps of ragged sentences, seven an epoch, the last of which has three of four lanes."""
    config = configure(Reporting, num_lanes=4, steps=23, log_every_steps=every_steps, **changes)
    distributed = DistributedConfig(equality="exact", reducer=reducer)
    checkpoint = CheckpointConfig(every=EveryConfig(steps=4), keep_last=100)
    return dataclasses.replace(config, distributed=distributed, checkpoint=checkpoint)


def text_of(folder: Path) -> str:
    return json.dumps(lines_of(folder), indent=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run on one process that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run_distributed(fit, 1, reporting(), str(folder))
    return folder


def noting(world, config) -> tuple[list[list[Any]], list[list[Any]]]:
    """Train alone; return what the lanes of each step reported, and those of each evaluation."""
    set_determinism("exact", 1)
    engine = build_engine(config, world)
    engine.step.pass_.looks.clear()  # which run a lane again
    task = engine.run.runner.task
    steps, evaluations = [], []
    task.noted = []
    for report in engine.steps():
        steps.append(task.noted)
        task.noted = []
        end = engine.run.loader.end_of(report.step)
        engine.evaluation.note_step(report.step, report.totals, end, ends_run=engine.ends_with(report.step))
        if engine.evaluation.is_due:
            engine.evaluation.run()
            evaluations.append(task.noted)
            task.noted = []
    return steps, evaluations


def mean(steps: list[list[Any]], name: str) -> float:
    value = weight = 0.0
    for lanes in steps:
        pairs = [lane.get(name, (0.0, 0.0)) for lane in lanes]
        value += math.fsum(one for one, _ in pairs)
        weight += math.fsum(one for _, one in pairs)
    return value / weight


def test_lines_are_what_the_lanes_reported(whole):
    """Not all lanes have the same names, and the last step of an epoch not all lanes."""
    steps, evaluations = run_distributed(noting, 1, reporting())[0]
    assert len({tuple(lane) for lane in steps[0]}) == 2
    assert [len(lanes) for lanes in steps[:7]] == [4] * 6 + [3]
    lines = lines_of(whole)
    trained = [line for line in lines if "train/loss" in line]
    begin = 0
    for line in trained:
        assert [line[f"train/{name}"] for name in NAMES] == [
            mean(steps[begin : line["step"]], name) for name in NAMES
        ]
        begin = line["step"]
    assert begin == 23
    evaluated = [line for line in lines if "held_out/loss" in line]
    assert len(evaluated) == len(evaluations) == 4
    for line, lanes in zip(evaluated, evaluations, strict=True):
        assert [line[f"held_out/{name}"] for name in NAMES] == [mean([lanes], name) for name in NAMES]


@pytest.mark.parametrize(("world_size", "one_machine"), [(3, True), *slow((2, True), (2, False))])
def test_files_are_the_same_on_any_number_of_processes(tmp_path, whole, world_size, one_machine):
    run_distributed(fit, world_size, reporting(), str(tmp_path), one_machine=one_machine)
    assert text_of(tmp_path) == text_of(whole)


def test_they_are_the_same_on_several_devices_of_one_process(tmp_path, whole):
    config = reporting(reducer="data_parallel")
    devices = dataclasses.replace(config.distributed, devices=("cpu", "cpu", "cpu"))
    run_distributed(fit, 1, dataclasses.replace(config, distributed=devices), str(tmp_path))
    assert text_of(tmp_path) == text_of(whole)


@pytest.mark.parametrize(
    ("saved", "world_size", "reducer"), [(8, 2, "ddp"), *slow((12, 3, "fsdp"), (16, 3, "ddp"))]
)
def test_a_run_that_goes_on_between_two_lines_writes_the_same(tmp_path, whole, saved, world_size, reducer):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for checkpoint in RunDir(folder).checkpoints.iterdir():
        if int(checkpoint.name[5:]) > saved:
            shutil.rmtree(checkpoint)
    first_steps = run_distributed(fit, world_size, reporting(reducer=reducer), str(folder))
    assert first_steps == [saved] * world_size
    assert text_of(folder) == text_of(whole)


class OfThreeSamples(Reporting):
    """So few samples that only some processes have one in the first step."""

    def __init__(self) -> None:
        super().__init__(num_samples=3)


def losses_and_metrics(world, config) -> list[Any]:
    set_determinism("exact", 1)
    return [(report.totals.loss, report.totals.metrics) for report in build_engine(config, world).steps()]


@pytest.mark.parametrize("precision", [*slow("float32"), "fp16"])
def test_a_process_without_samples_in_the_first_step_learns_the_names(precision):
    config = configure(OfThreeSamples, num_lanes=6, steps=3, precision=precision)
    alone, *_ = run_distributed(losses_and_metrics, 1, config)
    assert len(alone[0][1]) > 1
    for found in run_distributed(losses_and_metrics, 3, config):
        assert found == alone


@pytest.mark.parametrize("reducer", ["ddp", *slow("fsdp")])
def test_what_is_reported_changes_nothing_that_is_trained(reducer):
    """In fp16 a loss is scaled, and what it reports is not."""
    precision = "fp16" if reducer == "ddp" else "float32"
    config = configure(Reporting, num_lanes=4, steps=8, precision=precision)
    config = dataclasses.replace(config, distributed=DistributedConfig(equality="exact", reducer=reducer))
    plain = dataclasses.replace(config, task=configure(Language).task)
    reported, expected = (run_distributed(losses_and_metrics, 2, one) for one in (config, plain))
    for found, without in zip(reported, expected, strict=True):
        assert [loss for loss, _ in found] == [loss for loss, _ in without]
        assert not any(metrics for _, metrics in without)
        for loss, metrics in found:
            value, weight = (
                sum(one) for one in zip(*(metrics[name] for name in ("even", "odd")), strict=True)
            )
            assert value / weight == pytest.approx(loss, rel=1e-6)
