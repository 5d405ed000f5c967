"""A signal saves before anything else, and the run that goes on ends like one that was never stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.checkpoint.folder import CheckpointFolder
from lanewise.config import RunConfig
from lanewise.device.determinism import set_determinism
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.errors import PreemptedError
from lanewise.loggers.jsonl import JsonlLogger
from lanewise.run_dir import RunDir
from lanewise.testing import run_distributed
from lanewise.world.world import World
from tests.unit.engine.test_engine import Line, line

# Five steps, evaluated after steps 1, 3 and 4, the last one, on twelve samples.


class Signalled(Line):
    """Gets a signal in one of its forwards, in training or in an evaluation."""

    def __init__(self, forward: int | None, *, in_training: bool) -> None:
        super().__init__()
        self.num_left = forward
        self.in_training = in_training
        self.wants_stop = False
        self.num_evaluated = 0

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.num_evaluated += not model.training
        if self.num_left is not None and model.training == self.in_training:
            self.num_left -= 1
            self.wants_stop |= self.num_left == 0
        return super().forward(model, batch)


def fit(world: World, config: RunConfig, run_dir: RunDir, task: Signalled) -> Engine:
    set_determinism("exact", 1)
    run = build_run(config, world, task)
    folder = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, folder, ())
    evaluates_first = run.evaluation.is_due
    loggers = []
    if world.rank == 0:
        loggers = [JsonlLogger(run_dir.metrics, first_step, evaluates_first=evaluates_first)]
    saving = Saving(run, folder, lambda: task.wants_stop)
    engine = Engine(run, first_step=first_step, saving=saving)
    engine.fit(run_dir, loggers)
    world.all_gather_tree(None)
    return engine


def stop_and_go_on(
    world: World, config: RunConfig, folder: str, rank: int, *signals: tuple[int, bool]
) -> list[tuple[int, bool, int]]:
    """Give a run its signals, on one rank, one in each attempt; return what each checkpoint was of."""
    run_dir = RunDir(Path(folder))
    stops = []
    for forward, in_training in signals:
        task = Signalled(forward if world.rank == rank else None, in_training=in_training)
        with pytest.raises(PreemptedError, match="--resume"):
            fit(world, config, run_dir, task)
        (newest, *_) = CheckpointFolder(run_dir.checkpoints).all()
        state = json.loads((newest / "state.json").read_text())
        assert not run_dir.model.exists()
        stops.append((newest.name, state["best"]["is_due"], task.num_evaluated))
        world.all_gather_tree(None)
    fit(world, config, run_dir, Signalled(None, in_training=True))
    return stops


def result(folder: Path) -> Any:
    """What a run left that does not depend on when it ran."""
    run_dir = RunDir(folder)
    kept = ("step", "train/loss", "test/loss")
    lines = [json.loads(text) for text in run_dir.metrics.read_text().splitlines()]
    metrics = [{name: line[name] for name in kept if name in line} for line in lines]
    return metrics, run_dir.model.read_bytes(), run_dir.best_model.read_bytes()


def train_whole(folder: Path, config: RunConfig) -> Any:
    """Return what a run leaves that gets no signal."""
    run_distributed(stop_and_go_on, 1, config, str(folder), 0)
    return result(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train_whole(tmp_path_factory.mktemp("whole"), line())


def test_a_signal_saves_before_the_evaluation_that_is_due_then(tmp_path, whole):
    ((stop,),) = run_distributed(stop_and_go_on, 1, line(), str(tmp_path), 0, (7, True))
    assert stop == ("step-000002", True, 0)
    assert result(tmp_path) == whole


def test_so_it_does_after_a_step_that_is_not_logged(tmp_path, tmp_path_factory):
    config = line(log_every_steps=3)
    ((stop,),) = run_distributed(stop_and_go_on, 1, config, str(tmp_path), 0, (7, True))
    assert stop == ("step-000002", True, 0)
    assert result(tmp_path) == train_whole(tmp_path_factory.mktemp("whole"), config)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_in_an_evaluation_ends_it_on_every_rank(tmp_path, whole, world_size):
    every_stop = run_distributed(
        stop_and_go_on, world_size, line(), str(tmp_path), world_size - 1, (2, False), (1, False)
    )
    for first, second in every_stop:
        assert first[:2] == second[:2] == ("step-000002", True)
    assert every_stop[-1][0][2] == 2  # micro-batches of the rank that got the signal
    assert result(tmp_path) == whole


def test_a_signal_in_the_last_step_leaves_its_evaluation_to_the_run_that_goes_on(tmp_path, whole):
    ((stop,),) = run_distributed(stop_and_go_on, 1, line(), str(tmp_path), 0, (20, True))
    assert stop[:2] == ("step-000005", True)
    assert result(tmp_path) == whole
