"""What a loss reports: what is accepted, how lanes are added up, and what is said of mistakes."""

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
from lanewise.data import LaneBatch
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.run.build import build_run
from lanewise.engine.step.loss_metrics import (
    add_up,
    known_terms,
    means,
    means_of_lanes,
    metric_terms,
    with_metrics,
)
from lanewise.engine.step.losses import StepLosses
from lanewise.engine.step.message import LaneRow, StepTotals, Term
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import ConfigError, TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.dir import RunDir
from tests.distributed.tasks import configure

CPU = LocalWorld(torch.device("cpu"))


def test_numbers_and_scalar_tensors_are_accepted_and_lose_their_gradient():
    given = {
        "a": (torch.tensor([2.0], requires_grad=True) * 2, torch.tensor(3)),
        "b": [1, True],
        "c": (torch.tensor(0.5, dtype=torch.bfloat16), 2.0),
    }
    terms = metric_terms(given, "the loss")
    assert not terms["a"].value.requires_grad
    assert terms["a"].value.dim() == 0
    assert known_terms(terms, None) == {"a": Term(4.0, 3.0), "b": Term(1.0, 1.0), "c": Term(0.5, 2.0)}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([("a", (1, 2))], "the loss has metrics that are no mapping: got \\[\\('a', \\(1, 2\\)\\)\\]"),
        ({}.keys(), "are no mapping"),
        ({"": (1.0, 1.0)}, "whose name is no text, or empty: got ''"),
        ({3: (1.0, 1.0)}, "whose name is no text, or empty: got 3"),
        ({"a": 1.0}, "has a metric a that is no pair of scalars: got 1.0"),
        ({"a": (1.0,)}, r"no pair of scalars: got \(1.0\)"),
        ({"a": (torch.zeros(2), 1.0)}, r"no pair of scalars: got \(a tensor of shape \(2,\), 1.0\)"),
        ({"a": torch.zeros(2)}, r"no pair of scalars: got a tensor of shape \(2,\)"),
        ({"a": ("1", 1.0)}, r"no pair of scalars: got \('1', 1.0\)"),
        ({"a": (torch.tensor(1j), 1.0)}, "no pair of scalars"),
        *(
            ({name: (1.0, 1.0)}, f"has a metric with the name {name}, which is taken")
            for name in ("loss", "weight", "grad_norm", "learning_rate", "skipped_steps")
        ),
    ],
)
def test_what_is_no_mapping_of_pairs_is_refused(metrics, said):
    with pytest.raises(TaskError, match=said):
        metric_terms(metrics, "the loss")


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, torch.tensor(-0.5)])
def test_a_weight_that_cannot_be_is_refused(weight):
    with pytest.raises(TaskError, match=r"the metric a of the loss has the weight .*: need a finite number"):
        known_terms(metric_terms({"a": (1.0, weight)}, "the loss"), None)


def test_one_that_an_accelerator_told_names_the_lane():
    totals = StepTotals(
        [LaneRow(0, (Term(1.0, 1.0), Term(0.0, 0.0))), LaneRow(3, (Term(1.0, 1.0), Term(1.0, -2.0)))]
    )
    with pytest.raises(TaskError, match=r"the metric a of the loss has the weight -2\.0 in lane 3: need"):
        add_up(totals, ["a"])


def test_a_lane_without_a_name_counts_nothing_and_a_sum_that_is_not_finite_is_nan():
    rows = [LaneRow(lane, (Term(1.0, 1.0),)) for lane in range(3)]
    metrics = {
        0: {"a": Term(0.1, 1.0), "b": Term(math.inf, 1.0)},
        2: {"a": Term(0.2, 0.5), "c": Term(0.0, 0.0)},
    }
    totals = StepTotals(with_metrics(rows, metrics, ["a", "b", "c"]))
    sums = add_up(totals, ["a", "b", "c"])
    assert sums["a"] == (math.fsum([0.1, 0.2]), 1.5)
    assert means(sums) == pytest.approx({"a": 0.2, "b": math.nan, "c": math.nan}, nan_ok=True)
    assert (totals.loss_sum, totals.weight, totals.allow_update) == (3.0, 3.0, True)


def test_the_mean_over_a_dataset_does_not_depend_on_the_order():
    lanes = [
        {"b": torch.tensor([[0.1, 1.0], [0.7, 2.0]]).double()},
        {
            "a": torch.tensor([[math.nan, 1.0]]).double(),
            "b": torch.tensor([[1e16, 3.0], [-1e16, 1.0]]).double(),
        },
    ]
    forwards, backwards = means_of_lanes(lanes), means_of_lanes(lanes[::-1])
    assert list(forwards) == list(backwards) == ["a", "b"]
    assert math.isnan(forwards["a"])
    assert forwards["b"] == backwards["b"] == math.fsum(lanes[0]["b"][:, 0].tolist()) / 7


def test_a_lane_whose_loss_weighs_nothing_still_reports():
    losses = StepLosses(CPU, Placement.of(2, CPU), None)
    for _ in range(2):
        losses.begin()
        for lane in range(2):
            turn = LaneTurn(0, 0, lane, range(1), present=range(2), is_last=lane == 1)
            batch = LaneBatch(turn, (lane,), None, 1)
            metrics = {"a": (lane + 1.0, 2.0)} if lane == 0 else None
            given = Loss(torch.tensor(1.0, requires_grad=True), float(lane), metrics=metrics)
            losses.add(batch, LaneLoss.of(given, batch.num_samples, "the loss"))
        losses.start_exchange(turn, (False, False, False), [])
        totals = losses.finish()
        assert (totals.loss, totals.metrics) == (1.0, {"a": (1.0, 2.0)})


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
    """Let lanes report `late` after so many."""
    count = iter(range(1000))

    def metrics(_: torch.Tensor) -> Any:
        return {"late": (1.0, 1.0)} if next(count) >= num_lanes_before else {"early": (1.0, 1.0)}

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
    return [dict(one.columns(1, CPU.device)) for one in reports if one]


def test_a_line_has_the_mean_over_its_steps(monkeypatch):
    seen: list[tuple[float, int]] = []

    def metrics(inputs: torch.Tensor) -> Any:
        seen.append((float(inputs.sum()), len(inputs)))
        return {"first": (inputs.sum(), len(inputs)), "never": (0.0, 0)}

    lines = columns(monkeypatch, metrics)
    for line, begin, end in zip(lines, (0, 2, 6), (2, 6, 8), strict=True):
        value, weight = map(sum, zip(*seen[begin:end], strict=True))
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
    with pytest.raises(ConfigError, match=r"got test/first\. Use one of test/loss\."):
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
