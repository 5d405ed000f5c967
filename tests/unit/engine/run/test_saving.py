"""A signal saves before anything else, and the run that goes on ends like one that was never stopped."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lanewise import Callback, Task
from lanewise.config import RunConfig
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.errors import PreemptedError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.runs.loggers.jsonl import JsonlLogger
from lanewise.testing import run_distributed
from tests.slow import slow
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


def fit(
    world: World, config: RunConfig, run_dir: RunDir, task: Task, callback: Callback | None = None
) -> Engine:
    set_determinism("exact", 1)
    run = build_run(config, world, task)
    folder = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, folder, ())
    evaluates_first = run.evaluation.is_due
    loggers = []
    if world.rank == 0:
        loggers = [JsonlLogger(run_dir.metrics, first_step, evaluates_first=evaluates_first)]
    saving = Saving(run, folder, lambda: getattr(task, "wants_stop", False))
    engine = Engine(run, first_step=first_step, saving=saving)
    engine.fit(run_dir, loggers if callback is None else [*loggers, callback])
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
    num_forwards = 5 * 4 + 2 * 2  # in each of the first two steps a lane runs twice more
    ((stop,),) = run_distributed(stop_and_go_on, 1, line(), str(tmp_path), 0, (num_forwards, True))
    assert stop[:2] == ("step-000005", True)
    assert result(tmp_path) == whole


@dataclasses.dataclass(frozen=True)
class Ends(Callback):
    """Ends the run from one of its methods."""

    method: str

    def on_start(self, start):
        self._end("on_start")

    def on_step(self, epoch, step, metrics):
        self._end("on_step")

    def on_evaluation(self, epoch, step, values):
        self._end("on_evaluation")

    def on_best(self, epoch, step, model_file):
        self._end("on_best")

    def on_end(self, error):
        self.stop("too late")

    def _end(self, method: str) -> None:
        if method == self.method:
            self.stop("it is good enough")


def end_and_go_on(
    world: World, config: RunConfig, folder: str, method: str
) -> tuple[int, str | None, bytes, bool, list[str]]:
    """Let a callback end a run; return after how many steps, why, its model, and what is there."""
    run_dir = RunDir(Path(folder))
    engine = fit(world, config, run_dir, Line(), Ends(method))
    names = [path.name for path in CheckpointFolder(run_dir.checkpoints).all()]
    is_due = engine.evaluation.is_due
    world.all_gather_tree(None)
    model = run_dir.model.read_bytes()
    world.all_gather_tree(None)
    return engine.next_step, engine.stop_reason, model, is_due, names


def stop_and_end(world: World, config: RunConfig, folder: str) -> list[str]:
    """Give a run a signal in the step after which a callback ends it; return its checkpoints."""
    run_dir = RunDir(Path(folder))
    with pytest.raises(PreemptedError, match="--resume"):
        fit(world, config, run_dir, Signalled(1, in_training=True), Ends("on_start"))
    return [path.name for path in CheckpointFolder(run_dir.checkpoints).all()]


def test_a_signal_comes_before_the_wish_of_a_callback(tmp_path):
    """A run that a callback ended is done; one that a signal stopped goes on."""
    assert run_distributed(stop_and_end, 1, line(), str(tmp_path)) == [["step-000001"]]


def go_on(world: World, config: RunConfig, folder: str) -> int:
    return fit(world, config, RunDir(Path(folder)), Line()).first_step


@pytest.mark.parametrize(
    ("method", "num_steps", "equality"),
    [
        ("on_step", 2, "close"),
        ("on_evaluation", 3, "exact"),
        *slow(
            ("on_start", 1, "exact"),
            ("on_start", 1, "close"),
            ("on_step", 2, "exact"),
            ("on_evaluation", 3, "close"),
            ("on_best", 3, "exact"),
            ("on_best", 3, "close"),
        ),
    ],
)
def test_a_callback_ends_the_run_after_the_next_step_alike_on_any_number_of_processes(
    tmp_path, whole, method, num_steps, equality
):
    """The model is written, and the run that goes on ends like one that was never ended."""
    config = line()
    distributed = dataclasses.replace(config.distributed, equality=equality)
    config = dataclasses.replace(config, distributed=distributed)
    models = set()
    for world_size, other in ((1, 2), (2, 3), (3, 1)):
        folder = tmp_path / str(world_size)
        ended = run_distributed(end_and_go_on, world_size, config, str(folder), method)
        for rank, (steps, reason, model, is_due, names) in enumerate(ended):
            assert (steps, is_due, names[0]) == (num_steps, False, f"step-{num_steps:06d}")
            assert reason == ("it is good enough" if rank == 0 else None)
            models.add(model)
        assert run_distributed(go_on, other, config, str(folder)) == [num_steps] * other
        if equality == "exact":
            assert result(folder) == whole
    assert len(models) == 1 or equality == "close"


def test_without_being_ended_a_run_ends_at_its_end_whatever_a_callback_says_then(tmp_path):
    ((steps, reason, *_),) = run_distributed(end_and_go_on, 1, line(), str(tmp_path), "never")
    assert (steps, reason) == (5, None)
