"""A run ends when evaluations find nothing better, after the same step however it was stopped and resumed."""

import dataclasses
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchmetrics import MeanMetric, MeanSquaredError, Metric
from torchmetrics.classification import BinaryAccuracy

from lanewise import Callback
from lanewise.config import (
    CheckpointConfig,
    EarlyStoppingConfig,
    EvaluateConfig,
    EveryConfig,
    RunConfig,
    SchedulerConfig,
)
from lanewise.engine.engine import Engine
from lanewise.engine.evaluation.evaluation import EarlyStopping
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.errors import ConfigError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.tasks import Smooth, configure
from tests.slow import slow

nan = math.nan


def stopping(mode: str = "max", patience: int = 2, min_delta: float = 0.0) -> EarlyStopping:
    return EarlyStopping(
        EarlyStoppingConfig(metric="held_out/x", mode=mode, patience=patience, min_delta=min_delta)
    )


def ends_after(early: EarlyStopping, values: list[float]) -> int | None:
    """The number of evaluations after which the run ends."""
    for number, value in enumerate(values, start=1):
        early.note(value)
        if early.is_over:
            return number
    return None


@pytest.mark.parametrize(
    ("options", "values", "number"),
    [
        ({}, [1, 2, 3, 4], None),
        ({}, [1, 2, 2, 2, 9], 4),
        ({}, [1, 0, 2, 1, 3, 2, 1], 7),
        ({"mode": "min"}, [3, 2, 1, 2, 1], 5),
        ({"mode": "min"}, [3, 2, 1, 0], None),
        ({"patience": 1}, [1, 2, 1], 3),
        ({"min_delta": 1.0}, [1, 2, 1.5], 3),
        ({"min_delta": 0.5}, [1, 2, 3, 3.5, 3.6], None),
        ({"mode": "min", "min_delta": 0.5}, [3, 2.6, 2.5], 3),
        ({}, [nan, nan], 2),
        ({}, [1, nan, 2, nan, nan], 5),
        ({}, [math.inf, math.inf, math.inf], 3),
    ],
)
def test_when_a_run_ends(options, values, number):
    assert ends_after(stopping(**options), values) == number


def test_what_is_said():
    early = stopping(mode="min", min_delta=0.25)
    ends_after(early, [1.5, 1.5, 1.5])
    said = "early stopping: 2 evaluations found no held_out/x better than 1.5 by more than 0.25"
    assert early.describe() == said
    early = stopping()
    ends_after(early, [nan, nan])
    assert early.describe().endswith("found no held_out/x better than nothing but NaN")


def test_the_counter_and_the_best_value_survive():
    early, again = stopping(patience=3), stopping(patience=3)
    ends_after(early, [1, 0])
    again.load_state_dict(early.state_dict())
    assert ends_after(again, [1, 0.5]) == 2


def test_the_value_of_another_metric_is_forgotten():
    early, again = stopping(patience=1), stopping("min", patience=1)
    ends_after(early, [1, 0])
    again.load_state_dict(early.state_dict())
    assert not again.is_over


@pytest.mark.parametrize("change", [{"best": "1"}, {"num_without": -1}, {"num_without": True}, {"more": 1}])
def test_what_is_no_state_is_refused(change):
    with pytest.raises(ValueError, match="not a state of early stopping"):
        stopping().load_state_dict({**stopping().state_dict(), **change})


class Evaluated(Smooth):
    """Is evaluated on what it is trained on."""

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": self.train_dataset()}


def ending_early(**early_stopping: Any) -> RunConfig:
    """A run of at most 20 steps, evaluated after every second one, that never gets better by enough."""
    config = configure(Evaluated, num_lanes=4, steps=20)
    wanted = {"metric": "held_out/loss", "mode": "min", "patience": 3, "min_delta": 100.0, **early_stopping}
    return dataclasses.replace(
        config,
        evaluate=EvaluateConfig(every_steps=2, early_stopping=EarlyStoppingConfig(**wanted)),
        checkpoint=CheckpointConfig(every=EveryConfig(steps=3), keep_last=9),
    )


def train(world: World, config: RunConfig, folder: str) -> tuple[int, int, bytes, list[int]]:
    """Go on from what is there; return the first step, how many were taken, the model, and what is saved."""
    set_determinism("exact", 1)
    run = build_run(config, world)
    run_dir = RunDir(Path(folder))
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, checkpoints, ())
    saving = Saving(run, checkpoints)
    taken: list[object] = []
    run.training.optimizer.register_step_pre_hook(lambda *_: taken.append(None))
    Engine(run, first_step=first_step, saving=saving).fit(run_dir)
    world.all_gather_tree(None)
    steps = [step for step in range(21) if checkpoints.of_step(step).exists()]
    return first_step, len(taken), run_dir.model.read_bytes(), steps


@pytest.mark.parametrize("world_size", [1, 2, *slow(3)])
def test_all_ranks_end_after_the_same_step(tmp_path, world_size):
    """Evaluations are after 2, 4, 6 and 8 steps; the first finds something, and the next three do not."""
    config = ending_early()
    results = run_distributed(train, world_size, config, str(tmp_path))
    ((first, taken, model, saved),) = results[:1]
    assert (first, taken, saved) == (0, 8, [3, 6, 8])
    assert all(result == results[0] for result in results)
    checkpoints = CheckpointFolder(RunDir(tmp_path).checkpoints)
    for path in checkpoints.of_step(8).iterdir():  # killed before its end, it ends there all the same
        path.unlink()
    checkpoints.of_step(8).rmdir()
    for result in run_distributed(train, world_size % 3 + 1, config, str(tmp_path)):
        assert result == (6, 2, model, [3, 6, 8])
    for result in run_distributed(train, world_size, config, str(tmp_path)):  # it has ended
        assert result == (8, 0, model, [3, 6, 8])


def test_a_run_that_has_ended_goes_on_with_more_patience_or_without(tmp_path):
    run_distributed(train, 1, ending_early(), str(tmp_path))
    ((first, taken, *_),) = run_distributed(train, 1, ending_early(patience=5), str(tmp_path))
    assert (first, taken) == (8, 4)
    config = ending_early()
    config = dataclasses.replace(config, evaluate=EvaluateConfig(every_steps=2))
    ((first, taken, *_),) = run_distributed(train, 1, config, str(tmp_path))
    assert (first, taken) == (12, 8)


def test_a_run_that_gets_better_goes_on_to_its_end(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = ending_early(min_delta=0.0, patience=20)
    assert train(LocalWorld(torch.device("cpu")), config, str(tmp_path))[1] == 20
    assert "early stopping" not in caplog.text


def test_what_happened_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for said in ("trained 8 steps on", "nothing was left to train: all 8 steps were taken before"):
        train(LocalWorld(torch.device("cpu")), ending_early(), str(tmp_path))
        assert "early stopping: 3 evaluations found no held_out/loss better than" in caplog.text
        assert "the run ends after 8 of 20 steps (early stopping: " in caplog.text
        assert said in caplog.text
        caplog.clear()


def test_a_metric_that_is_none_is_refused():
    said = r"early_stopping\.metric must be a value .*: got held_out/los\. Did you mean held_out/loss. Use"
    with pytest.raises(ConfigError, match=said):
        build_run(ending_early(metric="held_out/los"), LocalWorld(torch.device("cpu")))


def test_without_eval_datasets_it_is_refused():
    said = r"metric must be .* Use one of \(the task has no eval_datasets\), train/loss_epoch"
    config = dataclasses.replace(ending_early(), task=configure(Smooth).task)
    with pytest.raises(ConfigError, match=said):
        build_run(config, LocalWorld(torch.device("cpu")))


TRAINED = "train/loss_epoch"


class Lines(Callback):
    """Notes the loss and the weight of each step, and the values of each evaluation."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.values: list[tuple[int, Mapping[str, float]]] = []

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((metrics["train/loss"], metrics["train/weight"]))

    def on_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self.values.append((step, values))


def unvalidated() -> RunConfig:
    """A run without eval datasets that follows its training loss, and ends when that falls by too little."""
    config = ending_early(metric=TRAINED, mode=None, min_delta=0.5)
    plateau = {"factor": 0.5, "patience": 0, "threshold": 0.5}
    return dataclasses.replace(
        config,
        task=configure(Smooth).task,
        scheduler=SchedulerConfig(class_path="torch.optim.lr_scheduler.ReduceLROnPlateau", init_args=plateau),
        evaluate=dataclasses.replace(config.evaluate, best=TRAINED, every_steps=3),
        checkpoint=CheckpointConfig(every=EveryConfig(steps=4), keep_last=9),
    )


def train_unvalidated(world: World, folder: str) -> tuple[Lines, int, float, dict[str, bytes]]:
    set_determinism("exact", 1)
    run = build_run(unvalidated(), world)
    run_dir = RunDir(Path(folder))
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, checkpoints, ())
    lines = Lines()
    Engine(run, first_step=first_step, saving=Saving(run, checkpoints)).fit(run_dir, [lines])
    world.all_gather_tree(None)
    assert run.evaluation is not None
    files = {path.name: path.read_bytes() for path in (run_dir.model, run_dir.best_model)}
    rate = run.training.optimizer.param_groups[0]["lr"]
    return lines, first_step, rate, files


def test_a_run_without_eval_datasets_follows_its_training_loss(tmp_path):
    """Best model, plateau and early stopping: none of them could once be had without validation data."""
    ((lines, _, rate, files),) = run_distributed(train_unvalidated, 1, str(tmp_path))
    assert [step for step, _ in lines.values] == [3, 6, 9, 12]  # three that are not better by 0.5
    for step, values in lines.values:
        of_steps = lines.steps[step - 3 : step]
        mean = sum(loss * weight for loss, weight in of_steps) / sum(weight for _, weight in of_steps)
        assert values == {TRAINED: pytest.approx(mean, rel=1e-12)}
    assert rate == pytest.approx(1e-2 / 8)
    checkpoints = CheckpointFolder(RunDir(tmp_path).checkpoints)
    for step in (8, 12):  # killed after its fourth step: the sum of that step is in its checkpoint
        for path in checkpoints.of_step(step).iterdir():
            path.unlink()
        checkpoints.of_step(step).rmdir()
    (again, first_step, *rest), _ = run_distributed(train_unvalidated, 2, str(tmp_path))
    assert (first_step, again.values, rest) == (4, lines.values[1:], [rate, files])


class Judged(Evaluated):
    """Has a metric that says what is better, and one that does not."""

    def build_metrics(self) -> Mapping[str, Metric]:
        return {
            "accuracy": MeanSquaredError(),
            "ppl": BinaryAccuracy(),
            "x": MeanMetric(),
            "mae": MeanMetric(),
        }

    def update_metrics(self, metrics: Mapping[str, Any], outputs: Any, batch: Any) -> None: ...


def modes_of(evaluate: EvaluateConfig) -> tuple[str | None, str | None, float]:
    """What a run makes of a section, and the mode of the checkpoints that it keeps."""
    config = dataclasses.replace(configure(Judged, steps=1), evaluate=evaluate)
    run = build_run(config, LocalWorld(torch.device("cpu")))
    made = run.config.evaluate
    assert run.evaluation is not None
    stopping = None if made.early_stopping is None else made.early_stopping.mode
    return made.best_mode, stopping, run.evaluation.sign


def following(metric: str, mode: str | None = None, **options: Any) -> EvaluateConfig:
    return EvaluateConfig(early_stopping=EarlyStoppingConfig(metric=metric, mode=mode, patience=1), **options)


@pytest.mark.parametrize(
    ("evaluate", "modes"),
    [
        (following("held_out/mae", best="held_out/loss"), ("min", "min", -1)),
        (following("held_out/accuracy", best="held_out/ppl"), ("max", "min", 1)),
        (following("held_out/mae", "max", best="held_out/mae", best_mode="max"), ("max", "max", 1)),
        (following("held_out/x", best="held_out/x", best_mode="min"), ("min", "min", -1)),
        (EvaluateConfig(), (None, None, 1)),
    ],
)
def test_a_metric_says_what_is_better_or_else_its_name(evaluate, modes):
    """What the user says wins over both, also for early stopping by the same metric."""
    assert modes_of(evaluate) == modes


@pytest.mark.parametrize(
    ("evaluate", "key"),
    [
        (EvaluateConfig(best="held_out/x"), "evaluate.best_mode"),
        (following("held_out/x"), "evaluate.early_stopping.mode"),
    ],
)
def test_where_neither_tells_the_mode_must_be_given_before_the_first_step(evaluate, key):
    """The worst model was once kept, as more of every value but loss counted as better."""
    said = f"{key} must be given: neither the metric held_out/x, by higher_is_better, nor its name says"
    with pytest.raises(ConfigError, match=re.escape(said)):
        modes_of(evaluate)
