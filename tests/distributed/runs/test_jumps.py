"""A sample that makes the loss jump is named: the same on any number of processes, also after a resume."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise import Loss, Task
from lanewise.config import CheckpointConfig, EveryConfig
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.processes.device.determinism import set_determinism
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.runs.loggers.jsonl import JsonlLogger
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure
from tests.slow import slow

POISONED, EPOCH = 17, 8
"""The one of 24 samples that is wrong in one epoch, of three steps."""


class Points(Dataset[Any]):
    """Points of a line."""

    def __init__(self, poisoned: int) -> None:
        self.poisoned, self.epoch = poisoned, 0

    def __len__(self) -> int:
        return 24

    def set_epoch(self, epoch: int) -> None:
        """Tell what is read."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        x = torch.tensor([index / 12 - 1])
        is_wrong = (index, self.epoch) == (self.poisoned, EPOCH)
        return x, torch.tensor([300.0]) if is_wrong else 2 * x + 0.1 * math.sin(index)


class Line(Task):
    """Learns a line."""

    def __init__(self, poisoned: int = POISONED) -> None:
        self.poisoned = poisoned

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_dataset(self) -> Dataset[Any]:
        return Points(self.poisoned)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss((outputs - batch[1]).square().sum(), len(batch[0]))


def fit(world, config, folder) -> None:
    """Train, or resume, and save every three steps."""
    set_determinism("exact", 1)
    run_dir = RunDir(Path(folder))
    run = build_run(config, world)
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, checkpoints, ())
    loggers = [JsonlLogger(run_dir.metrics, first_step, jumps=checkpoints.jumps)] if world.rank == 0 else []
    Engine(run, first_step=first_step, saving=Saving(run, checkpoints)).fit(run_dir, loggers)
    world.all_gather_tree(None)


def train(folder, world_size=1, steps=36, **init_args) -> list[dict[str, Any]]:
    """Train, or resume; return what the jumps say but for the time."""
    config = configure(Line, num_lanes=4, steps=steps, optimizer="torch.optim.SGD", lr=0.01, **init_args)
    checkpoint = CheckpointConfig(every=EveryConfig(steps=3), keep_last=1)
    run_distributed(fit, world_size, dataclasses.replace(config, checkpoint=checkpoint), str(folder))
    lines = map(json.loads, RunDir(folder).metrics.read_text().splitlines())
    return [{**line, "time": 0} for line in lines if line.get("event") == "jump"]


def saved(folder) -> list[str]:
    return sorted(path.name for path in RunDir(folder).checkpoints.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the jumps of a run that nobody stopped, on one process."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


def test_the_poisoned_sample_is_named_and_the_checkpoint_before_it_kept(whole):
    folder, (jump,) = whole
    largest = jump["largest_loss"]
    assert POISONED in largest["samples"]
    assert largest["step"] in range(EPOCH * 3 + 1, EPOCH * 3 + 4)
    assert largest["loss"] > 10 * jump["before"]
    assert saved(folder) == ["step-000024", "step-000036"]


@pytest.mark.parametrize("world_size", [3, *slow(2)])
def test_on_other_processes_it_is_the_same(whole, tmp_path, world_size):
    assert train(tmp_path / "run", world_size) == whole[1]


@pytest.mark.parametrize("stopped", [24, *slow(30)])
def test_over_a_resume_it_is_the_same(whole, tmp_path, stopped):
    """Before the jump and after it: the checkpoint before is kept by a start that did not see the jump."""
    train(tmp_path / "run", steps=stopped)
    assert train(tmp_path / "run", world_size=2) == whole[1]
    assert saved(tmp_path / "run") == ["step-000024", "step-000036"]


def test_without_it_there_is_no_jump(tmp_path):
    assert train(tmp_path / "run", poisoned=-1) == []
    assert saved(tmp_path / "run") == ["step-000036"]
