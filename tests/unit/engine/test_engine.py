"""The loop: which events its callbacks see, and which metrics."""

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise import Callback, RunStart, Task
from lanewise.config import ClassConfig, EvaluateConfig, RunConfig
from lanewise.engine import engine as engine_module
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.observers import Observers
from lanewise.engine.run.build import build_callbacks, build_run
from lanewise.errors import ConfigError, NonFiniteLossError
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure


class Line(Task):
    """A linear model whose loss on all 12 samples falls with every step; from some step on it is NaN."""

    def __init__(self, first_bad_step: int = 1000) -> None:
        self.first_bad_step = first_bad_step

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.arange(12.0).unsqueeze(1) / 12
        return TensorDataset(inputs, 2 + inputs)

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"test": self.train_dataset()}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        is_good = self.progress.number < self.first_bad_step
        return F.mse_loss(outputs, batch[1]) * (1 if is_good else math.nan)


class Remember(Callback):
    """Notes every event."""

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.events: list[tuple[Any, ...]] = []
        self.metrics: list[dict[str, float]] = []

    def on_start(self, start):
        self.events.append(("start", start.run_dir, start.first_step, start.last_step))

    def on_step(self, epoch, step, metrics):
        self.events.append(("step", epoch, step))
        self.metrics.append(dict(metrics))

    def on_evaluation(self, epoch, step, values):
        self.events.append(("evaluation", epoch, step, *values))

    def on_best(self, epoch, step, model_file):
        assert model_file.stat().st_size
        self.events.append(("best", epoch, step, model_file))

    def on_end(self, error):
        self.events.append(("end", error))


class Starts(Callback):
    """Keeps what it was told of each start."""

    def __init__(self) -> None:
        self.starts: list[RunStart] = []

    def on_start(self, start):
        self.starts.append(start)


class Silent(Callback):
    """Leaves every event out."""


def line(steps: int = 5, best_mode: str = "min", **init_args: Any) -> RunConfig:
    """Three steps an epoch, evaluated after each second one."""
    config = configure(
        Line, num_lanes=4, micro_batch_size=1, steps=steps, optimizer="torch.optim.SGD", **init_args
    )
    evaluate = EvaluateConfig(every_steps=2, best="test/loss", best_mode=best_mode)
    return dataclasses.replace(config, evaluate=evaluate)


def without_evaluation(**options: Any) -> RunConfig:
    return dataclasses.replace(line(**options), evaluate=EvaluateConfig(every_steps=1000))


def fit(config: RunConfig, folder: Path) -> Remember:
    seen = Remember()
    build_engine(config, LocalWorld(torch.device("cpu"))).fit(RunDir(folder), [Silent(), seen, Callback()])
    return seen


@pytest.mark.parametrize(("best_mode", "steps_of_best"), [("min", [2, 4, 5]), ("max", [2])])
def test_events_come_in_the_order_of_the_run(tmp_path, best_mode, steps_of_best):
    expected: list[tuple[Any, ...]] = [("start", tmp_path, 1, 5)]
    for step in range(1, 6):
        epoch = (step - 1) // 3 + 1
        expected.append(("step", epoch, step))
        if step in {2, 4, 5}:
            expected.append(("evaluation", epoch, step, "test/loss"))
        if step in steps_of_best:
            expected.append(("best", epoch, step, tmp_path / "best.safetensors"))
    assert fit(line(best_mode=best_mode), tmp_path).events == [*expected, ("end", None)]


@pytest.mark.parametrize(
    ("train", "key"), [({}, "max_steps"), ({"max_steps": None, "epochs": 2}, "epochs")], ids=str
)
def test_a_run_with_nothing_left_names_what_ended_it(tmp_path, caplog, train, key):
    caplog.set_level(logging.INFO)
    config = without_evaluation()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **train))
    run = build_run(config, LocalWorld(torch.device("cpu")))
    Engine(run, first_step=run.last_step).fit(RunDir(tmp_path))
    said = f"all {run.last_step} steps were taken before, up to train.{key}. Raise it to continue"
    assert said in caplog.text


def test_the_end_is_told_what_made_training_fail(tmp_path):
    seen = Remember()
    engine = build_engine(line(first_bad_step=1), LocalWorld(torch.device("cpu")))
    with pytest.raises(NonFiniteLossError) as caught:
        engine.fit(RunDir(tmp_path), [seen])
    assert seen.events == [("start", tmp_path, 1, 5), ("step", 1, 1), ("end", caught.value)]
    assert not RunDir(tmp_path).model.exists()


def events_on_each_rank(world, config, folder) -> list[str]:
    seen = Remember()
    build_engine(config, world).fit(RunDir(Path(folder)), [seen])
    return [name for name, *_ in seen.events]


def test_callbacks_are_called_on_rank_0_only(tmp_path):
    first, second = run_distributed(events_on_each_rank, 2, line(steps=1), str(tmp_path))
    assert first == ["start", "step", "evaluation", "best", "end"]
    assert second == []


def test_a_steps_metrics_are_finite_and_named_with_their_units(tmp_path):
    seen = fit(line(steps=3), tmp_path)
    assert len(seen.metrics) == 3
    for metrics in seen.metrics:
        assert sorted(metrics) == [
            "memory/peak_gib",
            "perf/samples_per_second",
            "perf/step_p50_seconds",
            "perf/step_p95_seconds",
            "perf/units_per_second",
            "time/backward_seconds",
            "time/communication_seconds",
            "time/data_seconds",
            "time/forward_seconds",
            "time/optimizer_seconds",
            "train/grad_norm",
            "train/learning_rate",
            "train/loss",
            "train/weight",
        ]
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
        phases = {name: value for name, value in metrics.items() if name.startswith("time/")}
        assert phases.pop("time/communication_seconds") == 0.0  # of one process with itself
        assert min(phases.values()) > 0
        assert metrics["perf/samples_per_second"] == pytest.approx(4 / sum(phases.values()))
        assert 0.01 < metrics["memory/peak_gib"] < 1000
        assert metrics["train/learning_rate"] == 1e-2
        assert metrics["train/grad_norm"] > 0
        assert metrics["train/loss"] > 0
        assert metrics["train/weight"] == 4.0
        assert metrics["perf/units_per_second"] == metrics["perf/samples_per_second"]
        spent = pytest.approx(sum(phases.values()))  # of one step
        assert (metrics["perf/step_p50_seconds"], metrics["perf/step_p95_seconds"]) == (spent, spent)


@pytest.mark.parametrize("peak", [None, 2e12])
def test_a_line_has_the_speed_of_a_device_where_the_operations_of_a_sample_are_known(
    tmp_path, monkeypatch, peak
):
    monkeypatch.setattr(engine_module, "peak_flops_per_second", lambda *_: peak)
    config = without_evaluation(steps=1)
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, flops_per_sample=5e9))
    (metrics,) = fit(config, tmp_path).metrics
    flops = 5e9 * metrics["perf/samples_per_second"]
    assert metrics["perf/tflops_per_second"] == pytest.approx(flops / 1e12)
    expected = None if peak is None else pytest.approx(flops / peak)
    assert metrics.get("perf/mfu") == expected


def test_a_line_has_the_mean_times_and_all_samples_of_its_steps(tmp_path, monkeypatch):
    now = count(0.0, 1 / 64)  # each look at the clock takes so long
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    every, seldom = (
        fit(without_evaluation(log_every_steps=every_steps), tmp_path).metrics for every_steps in (1, 3)
    )
    intervals = [every[0:1], every[1:3], every[3:5]]
    for metrics, interval in zip(seldom, intervals, strict=True):
        seconds = {name: sum(step[name] for step in interval) for name in metrics if name.startswith("time/")}
        assert {name: metrics[name] for name in seconds} == pytest.approx(
            {name: spent / len(interval) for name, spent in seconds.items()}
        )
        num_samples = 4 * len(interval)
        assert metrics["perf/samples_per_second"] == pytest.approx(num_samples / sum(seconds.values()))


def test_the_line_after_a_resume_has_the_times_of_this_process_alone(tmp_path, monkeypatch):
    now = count(0.0, 1 / 64)
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    run = build_run(without_evaluation(log_every_steps=5), LocalWorld(torch.device("cpu")))
    run.log_interval.load_state_dict({"num_steps": 2, "loss_sum": 9.0, "weight": 8.0})
    seen = Remember()
    Engine(run, first_step=3).fit(RunDir(tmp_path), [seen])
    (metrics,) = seen.metrics
    spent = sum(value for name, value in metrics.items() if name.startswith("time/"))
    assert metrics["perf/samples_per_second"] == pytest.approx(4 / spent)
    assert metrics["train/weight"] == 4.0


def test_a_callback_is_told_the_configuration_and_the_id_of_the_run(tmp_path):
    config, seen = without_evaluation(), Starts()
    run = build_run(config, LocalWorld(torch.device("cpu")))
    Engine(run, first_step=3).fit(RunDir(tmp_path), [seen], "the id")
    assert seen.starts == [RunStart(tmp_path, "the id", config, first_step=4, last_step=5)]


def test_callbacks_are_called_after_logged_steps_only(tmp_path):
    steps = [
        event[2] for event in fit(line(steps=9, log_every_steps=4), tmp_path).events if event[0] == "step"
    ]
    assert steps == [1, 4, 8, 9]


def test_a_line_is_shown_in_the_step_after_its_own_where_looking_at_it_would_wait(tmp_path):
    """Not with the next line: that may be far away."""
    seen = Remember()
    engine = build_engine(line(steps=9, log_every_steps=4), LocalWorld(torch.device("cpu")))
    observers = Observers([seen], lambda _: None, engine._name_metrics, num_behind=1)
    shown = []
    for report in engine.steps():
        observers.show(report.interval)
        shown.append([event[2] for event in seen.events])
    observers.catch_up()
    assert shown == [[], [1], [1], [1], [1, 4], [1, 4], [1, 4], [1, 4], [1, 4, 8]]
    assert [event[2] for event in seen.events] == [1, 4, 8, 9]


def with_callbacks(*sections: ClassConfig) -> RunConfig:
    return dataclasses.replace(line(), callbacks=sections)


def test_configured_callbacks_are_built_in_order():
    first = ClassConfig(class_path=f"{__name__}.Remember", init_args={"label": "mine"})
    second = ClassConfig(class_path=f"{__name__}.Silent")
    one, other = build_callbacks(with_callbacks(first, second))
    assert type(one).__name__ == "Remember"
    assert one.label == "mine"
    assert type(other).__name__ == "Silent"
    assert build_callbacks(line()) == []


def test_what_is_no_callback_is_an_error():
    with pytest.raises(ConfigError, match=r"^callbacks.0.class_path must name a lanewise.Callback: torch"):
        build_callbacks(with_callbacks(ClassConfig(class_path="torch.nn.Identity")))
