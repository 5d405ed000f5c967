"""Where in the run a step is, as a task sees it: the same on any number of devices, and when it goes on."""

import shutil
from contextvars import Context
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lanewise
from lanewise import Loss
from lanewise.config import DataConfig, EvaluateConfig, FSDPConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.errors import TaskError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.reduce.test_reducers import configured, run, train_part
from tests.distributed.runs.test_log import fit, lines_of
from tests.distributed.streams import Lanes, Plain
from tests.distributed.tasks import Sentences, Smooth, configure, state_bytes

LAST = 10
"""Steps of a run, of which an epoch has seven."""


class Annealed(Smooth):
    """Each part of a step depends on where it is; forward and loss also on what collate saw."""

    def __init__(self, kind: str = "Sentences") -> None:
        super().__init__()
        self.kind = kind

    def train_dataset(self) -> Any:
        return {"Sentences": super().train_dataset, "Lanes": Lanes, "Plain": Plain}[self.kind]()

    def collate(self, samples: list[Any]) -> Any:
        tokens = nn.functional.pad(super().collate(samples), (0, 9))[:, :9]
        return tokens, torch.tensor([[self.progress.number, self.progress.epoch]] * len(samples))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        tokens, place = batch
        ahead = place[0] - torch.tensor([self.progress.number, self.progress.epoch])
        return model(tokens) * (1 + self.progress.number / 10 + ahead.sum())

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        loss = super().loss(outputs, batch[0])
        told = torch.tensor([self.progress.number, self.progress.epoch])
        same = (batch[1] == told).all().double()
        metrics = {"number": (self.progress.number, 1), "is_same": (same, 1)}
        return Loss(loss.sum * (1 + self.progress.epoch), loss.weight, metrics=metrics)

    def after_update(self, model: nn.Module, step: Any) -> None:
        assert step.progress == self.progress
        model[1].bias.add_(step.progress.number * 1e-3)

    def eval_datasets(self) -> dict[str, Any]:
        return {"held_out": Sentences(11)}

    def eval_loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        metrics = {"epoch": (float(batch[1][0, 1]), 1.0), "fraction": (self.progress.fraction or -1.0, 1.0)}
        return Loss.mean(batch[1][:, 0].double().mean(), len(batch[1]), metrics=metrics)


class ByBatch(Annealed):
    """The same in a loss of all samples."""

    loss = lanewise.Task.loss

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Any:
        return Annealed.loss(self, outputs, inputs)

    def batch_loss_inputs(self, batch: Any) -> Any:
        return batch


def config_of(task: type[Annealed], reducer: str, num_devices: int, workers: int, **others: Any) -> RunConfig:
    config = configure(task, num_lanes=4, steps=LAST, optimizer="torch.optim.SGD", **others)
    distributed = configured(reducer, num_devices).distributed
    distributed = replace(distributed, fsdp=FSDPConfig(blocks=("Tanh",)))  # the rest is one block
    data = DataConfig(num_workers=workers, shuffle_buffer=6 if others.get("kind") == "Plain" else 0)
    return replace(config, distributed=distributed, data=data, evaluate=EvaluateConfig(every_steps=4))


def train(world: World, config: RunConfig) -> Any:
    set_determinism("exact", threads=1)
    engine = build_engine(config, world)
    seen = [report.interval.totals.metrics for report in engine.steps()]
    return state_bytes(engine.training.model), seen


@pytest.mark.parametrize("task", [Annealed, ByBatch])
def test_every_part_of_a_step_sees_the_same_place_on_any_number_of_devices(task):
    expected, seen = run(config_of(task, "single", 1, 0), train)
    assert seen == [{"is_same": 1.0, "number": number} for number in range(LAST)]
    for layout in (("ddp", 3, 2), ("fsdp", 2, 0), ("data_parallel", 2, 2)):
        assert run(config_of(task, *layout), train) == (expected, seen), layout


@pytest.mark.parametrize("kind", ["Lanes", "Plain"])
def test_a_stream_that_is_read_ahead_sees_the_step_for_which_it_is_read(kind):
    expected, seen = run(config_of(Annealed, "single", 1, 0, kind=kind), train)
    assert seen == [{"is_same": 1.0, "number": number} for number in range(LAST)]
    assert run(config_of(Annealed, "ddp", 2, 2, kind=kind), train) == (expected, seen)


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_sees_the_same(tmp_path):
    whole, _ = run(config_of(Annealed, "single", 1, 0), train)
    for layout, last_step in ((("ddp", 3, 2), 4), (("single", 1, 0), 9), (("data_parallel", 2, 0), LAST)):
        found = run(config_of(Annealed, *layout), train_part, str(tmp_path), last_step)
    assert found == whole


class AsksInCollate(Smooth):
    """Anneals what it reads by the length of the run, and asks where a loader's process reads ahead."""

    def collate(self, samples: list[Any]) -> Any:
        tokens = super().collate(samples)
        return tokens if self.progress.fraction < 0.5 else tokens.clamp(max=9)


class AsksAfterUpdate(Smooth):
    def after_update(self, model: nn.Module, step: Any) -> None:
        model[1].bias.add_(step.progress.fraction)


class CountsSteps(Smooth):
    """The number of a step is the same in a longer run."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        loss = super().loss(outputs, batch)
        return replace(loss, sum=loss.sum * (1 + self.progress.number))


@pytest.mark.parametrize("task", [AsksInCollate, AsksAfterUpdate, CountsSteps])
def test_to_train_longer_is_refused_where_something_asked_for_the_length(tmp_path, task):
    def train_up_to(steps: int) -> Any:
        config = configure(task, num_lanes=4, steps=steps, optimizer="torch.optim.SGD")
        workers = replace(config.data, num_workers=1)
        return run_distributed(fit, 2, replace(config, data=workers), str(tmp_path))

    train_up_to(4)
    if task is CountsSteps:
        assert train_up_to(6) == [4, 4]
        return
    with pytest.raises(
        RuntimeError, match=r"of 4 steps, and this one has 6: .*self\.progress.*--allow num_st"
    ):
        train_up_to(6)


def test_an_evaluation_sees_where_the_weights_are(tmp_path):
    arguments = {
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "train": {"max_steps": LAST, "run_dir": str(tmp_path / "run")},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        "evaluate": {"every_steps": 4, "best": "held_out/loss"},
        "data": {"num_workers": 1},
    }
    result = lanewise.train(Annealed(), **arguments)
    names = ("loss", "epoch", "fraction")
    found = [[line.get(f"held_out/{name}") for name in names] for line in lines_of(tmp_path / "run")]
    evaluated = [values for values in found if values[0] is not None]
    assert evaluated == [[4, 0, 0.4], [8, 1, 0.8], [10, 1, 1]]
    assert lanewise.evaluate(result.run_dir, task=Annealed(), weights="last") == result.evaluation
    assert lanewise.evaluate(result.run_dir, task=Annealed())["held_out/loss"] == 4  # of the best
    assert lanewise.evaluate(result.best_model_file, task=Annealed())["held_out/loss"] == 4
    moved = shutil.copy(result.best_model_file, tmp_path / "elsewhere.safetensors")
    with pytest.raises(TaskError, match=r"self\.progress is known .* read it only where model\.training"):
        lanewise.evaluate(result.run_dir, task=Annealed(), weights=moved)


def test_outside_of_a_run_there_is_none():
    with pytest.raises(TaskError, match=r"In a loop of your own use step\.number and step\.epoch"):
        Context().run(lambda: Annealed().progress)  # not in that of a test before, which took some steps
