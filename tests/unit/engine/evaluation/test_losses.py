"""What a loss reports, in training and in an evaluation: how it is added up, and what is said of mistakes."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanMetric, Metric

from lanewise import Loss, Task
from lanewise.config import EvaluateConfig, RunConfig
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.evaluation.losses import merge_losses
from lanewise.engine.run.build import build_run
from lanewise.errors import ConfigError, TaskError
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.dir import RunDir
from tests.distributed.tasks import configure

CPU = LocalWorld(torch.device("cpu"))


def test_the_mean_over_a_dataset_does_not_depend_on_the_order():
    b = torch.tensor([[0.1, 1.0], [0.7, 2.0]]).double()
    others = {"a": torch.tensor([[math.nan, 1.0]]), "b": torch.tensor([[1e16, 3.0], [-1e16, 1.0]]).double()}
    lanes = [({}, {"b": b}), ({}, others)]
    forwards, backwards = merge_losses(lanes), merge_losses(lanes[::-1])
    assert list(forwards) == list(backwards) == ["a", "b"]
    assert math.isnan(forwards["a"])
    assert forwards["b"] == backwards["b"] == math.fsum(b[:, 0].tolist()) / 7
    assert list(merge_losses([*lanes, ({"0": torch.tensor([[1.0, 2.0]])}, {})])) == ["loss", "a", "b"]


def test_a_metric_may_have_a_name_that_begins_as_the_loss_does(monkeypatch):
    """Terms of the loss were told from metrics by their names: these were added to it, and vanished."""
    parts = {"loss ce": 2.0, "loss 0": 3.0, "0": 4.0}
    monkeypatch.setattr(
        Reports, "metrics", staticmethod(lambda _: {name: (value, 1.0) for name, value in parts.items()})
    )
    values = build_run(reporting(), CPU).evaluation.run()[0]
    monkeypatch.setattr(Reports, "metrics", staticmethod(lambda _: None))
    alone = build_run(reporting(), CPU).evaluation.run()[0]
    assert values == alone | {f"test/{name}": value for name, value in parts.items()}


class Reports(Task):
    """A linear model on eight numbers, whose lanes report what they are told, by the first number of each."""

    metrics: Callable[[torch.Tensor], Any] = staticmethod(
        lambda inputs: {"first": (inputs.sum(), len(inputs))}
    )

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(8.0).unsqueeze(1))

    def eval_datasets(self) -> dict[str, Dataset[Any]]:
        return {"test": self.train_dataset()}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss.mean(outputs.square().mean(), len(outputs), metrics=type(self).metrics(batch[0]))


def reporting(steps: int = 4) -> RunConfig:
    """Two lanes of two samples; two steps an epoch."""
    config = configure(Reports, num_lanes=2, steps=steps, optimizer="torch.optim.SGD", log_every_steps=3)
    return dataclasses.replace(config, evaluate=EvaluateConfig(every_steps=1000))


@pytest.mark.parametrize("metrics", [{"a": 1.0}, {"a": (1.0, -1.0)}, 3, {"loss": (1.0, 1.0)}])
def test_an_error_names_the_lane_and_its_samples(monkeypatch, metrics):
    monkeypatch.setattr(Reports, "metrics", staticmethod(lambda _: metrics))
    with pytest.raises(TaskError) as caught:
        list(build_engine(reporting(), CPU).steps())
    assert any("lane 0" in note and "step 1" in note for note in caught.value.__notes__)


def later(monkeypatch, num_lanes_before: int) -> None:
    """Let lanes report `late` after so many, each of which has a seed of its own."""
    seen: dict[int, int] = {}

    def metrics(_: torch.Tensor) -> Any:
        number = seen.setdefault(torch.initial_seed(), len(seen))
        return {"late": (1.0, 1.0)} if number >= num_lanes_before else {"early": (1.0, 1.0)}

    monkeypatch.setattr(Reports, "metrics", staticmethod(metrics))


def test_a_name_that_appears_later_is_refused_by_its_name(monkeypatch):
    later(monkeypatch, 3)
    with pytest.raises(
        TaskError, match="the loss reports the metric late, which no lane reported in the first"
    ) as caught:
        list(build_engine(reporting(), CPU).steps())
    assert any("lane 1" in note and "step 2" in note for note in caught.value.__notes__)
    later(monkeypatch, 1)
    *_, report = build_engine(reporting(), CPU).steps()
    assert report.totals.metrics == {"early": (0.0, 0.0), "late": (2.0, 2.0)}


def test_a_run_that_goes_on_knows_the_names_of_its_checkpoint(monkeypatch):
    """Its first step may lack a name that the first step of the run had, and a later step have it."""
    later(monkeypatch, 3)
    run = build_run(reporting(), CPU)
    state = {"num_steps": 1, "loss_sum": 1.0, "weight": 4.0, "metrics": {"late": [6.0, 1.0]}}
    run.log_interval.load_state_dict(state)
    lines = [report.interval for report in Engine(run, first_step=1).steps() if report.interval]
    assert lines[0].totals.metrics == {"late": (6.0 + 1) / 2, "early": 1.0}


def columns(monkeypatch, metrics: Callable[[torch.Tensor], Any]) -> list[dict[str, float]]:
    monkeypatch.setattr(Reports, "metrics", staticmethod(metrics))
    reports = [report.interval for report in build_engine(reporting(), CPU).steps()]
    return [dict(report.columns(1, CPU.device)) for report in reports if report]


def test_a_line_has_the_mean_over_its_steps(monkeypatch):
    by_seed: dict[int, tuple[float, int]] = {}  # of the lane, which may run several times

    def metrics(inputs: torch.Tensor) -> Any:
        by_seed[torch.initial_seed()] = (float(inputs.sum()), len(inputs))
        return {"first": (inputs.sum(), len(inputs)), "never": (0.0, 0)}

    lines = columns(monkeypatch, metrics)
    for line, begin, end in zip(lines, (0, 2, 6), (2, 6, 8), strict=True):
        value, weight = map(sum, zip(*[*by_seed.values()][begin:end], strict=True))
        assert line["train/first"] == value / weight
        assert math.isnan(line["train/never"])


def test_a_sum_that_is_not_finite_changes_nothing_else(monkeypatch):
    plain = columns(monkeypatch, lambda _: None)
    with_nan = columns(monkeypatch, lambda _: {"bad": (torch.tensor(math.nan), 1.0)})
    for before, now in zip(plain, with_nan, strict=True):
        assert math.isnan(now["train/bad"])
        names = [name for name in before if name.startswith("train/")]
        assert [before[name] for name in names] == [now[name] for name in names]
        assert set(now) - set(before) == {"train/bad"}


def test_best_names_what_is_known_before_training():
    """A loss reports a name when it first runs, and a misspelt one would cost the training until then."""
    config = dataclasses.replace(reporting(), evaluate=EvaluateConfig(every_steps=2, best="test/first"))
    with pytest.raises(ConfigError, match=r"got test/first\. Use one of test/loss, train/loss_epoch\."):
        build_engine(config, CPU)


class Twice(Reports):
    """Its loss and one of its metrics have the same name."""

    def build_metrics(self) -> dict[str, Metric]:
        return {"first": MeanMetric()}

    def update_metrics(self, metrics: Any, outputs: torch.Tensor, batch: Any) -> None:
        metrics["first"].update(outputs)


def test_a_name_that_a_metric_of_the_task_has_is_refused(tmp_path: Path):
    config = dataclasses.replace(reporting(), task=configure(Twice).task)
    with pytest.raises(TaskError, match="the loss reports first, and test/first is a value of the metrics"):
        build_engine(config, CPU).fit(RunDir(tmp_path))
