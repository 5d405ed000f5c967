"""In what way a micro-batch has an influence on the gradient; what is no mistake is not called one."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task
from lanewise.commands.verify.cut import CutProbe, probe_cut
from lanewise.commands.verify.probed_run import ProbedRun
from lanewise.config import BatchConfig
from tests.distributed.tasks import configure

RARE = torch.tensor([1.0, 9.0, 1.0, 1.0])
"""Weights of four classes, of which two come, and one of which the first lane's micro-batch lacks."""


class Judged(Task):
    """Rows with one of two classes, the second of which every sixth one has; the loss is given."""

    is_zero = False
    judge: Callable[[torch.Tensor, torch.Tensor], Any]

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        if self.is_zero:
            nn.init.zeros_(model[2].weight)
        return model

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(48, 6, generator=generator)
        return TensorDataset(rows, (torch.arange(48) % 6 == 5).long())

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return type(self).judge(outputs, batch[1])


def smoothed(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    labels = F.one_hot(classes, 4).float()
    return F.cross_entropy(logits, 0.9 * labels + 0.1 * labels.mean(0))


def smoothed_by_a_mean(logits: torch.Tensor, classes: torch.Tensor) -> Loss:
    likely = F.log_softmax(logits, -1)
    return Loss(F.nll_loss(likely, classes, reduction="sum") - likely.mean(), len(classes))


def two_means(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, classes, weight=RARE) + logits.square().mean()


def negatives(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(3 * logits @ logits.T, torch.arange(len(logits)))


def ranked(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    scores = logits[:, 0]
    return (1 - scores[:, None] + scores).relu().triu().mean()


def spread(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, classes) - logits.var(0, unbiased=False).sum()


def entropy_of_the_mean(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    mean = logits.softmax(-1).mean(0)
    return F.cross_entropy(logits, classes) + (mean * mean.log()).sum()


def root(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (logits - 1).square().mean().sqrt()


def of_one_score(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A gradient of one direction for each sample: whatever compares them only weighs them otherwise."""
    scores = logits[:, 0]
    return scores.square().mean() - F.logsigmoid(scores[:, None] - scores).triu().mean()


def deviating(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, classes) + logits.std(0).sum()


def over_the_frequent(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    kept = classes == 0
    return (F.cross_entropy(logits, classes, reduction="none") * kept).sum() / kept.sum()


def apart_from_the_mean(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (logits - logits.mean(0)).square().mean()


def over_the_rare(logits: torch.Tensor, classes: torch.Tensor) -> Loss:
    """A sum over all samples that is divided by those of the second class, which most parts lack."""
    return Loss(F.cross_entropy(logits, classes, reduction="sum"), classes.sum())


def probe(
    judge: Any, task: type[Task] = Judged, size: int = 4, changed_buffers: Any = (), **attributes: Any
) -> CutProbe:
    made = type("Judging", (task,), {"judge": staticmethod(judge), "__module__": __name__, **attributes})
    globals()["Judging"] = made  # where the configuration finds it
    config = configure(made, num_lanes=4)
    batch = BatchConfig(global_batch_size=4 * size, micro_batch_size=size)
    probed = ProbedRun(type(config)(**{**vars(config), "batch": batch}), torch.device("cpu"))
    return probe_cut(probed, changed_buffers)


def influence(judge: Any, task: type[Task] = Judged, **attributes: Any) -> str:
    found = probe(judge, task, **attributes)
    assert (found.num_samples, found.why_not) == (4, "")
    assert bool(found.difference) == bool(found.influence)
    return found.influence


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        (F.cross_entropy, ""),
        (smoothed, "targets"),
        (smoothed_by_a_mean, "targets"),
        (two_means, "targets"),
        (negatives, "loss"),
        (ranked, "loss"),
        (spread, "loss"),
        (entropy_of_the_mean, "loss"),
        (root, "weights"),
        (of_one_score, "loss"),
        (over_the_rare, ""),
    ],
)
def test_terms_of_the_micro_batch_are_told_from_comparisons_of_samples(judge, expected):
    assert influence(judge) == expected


@pytest.mark.parametrize("judge", [negatives, ranked])
def test_comparisons_are_seen_where_all_outputs_are_zeros_at_first(judge):
    assert influence(judge, is_zero=True) == "loss"


def test_a_mean_over_class_weights_is_seen_though_the_first_lane_has_one_class():
    """It was missed once, as only the first lane's micro-batch was cut."""
    assert influence(lambda *given: F.cross_entropy(*given, weight=RARE)) == "weights"


class Normed(Judged):
    """Has statistics, which a micro-batch of one sample has not."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))


def test_a_mean_over_class_weights_is_seen_where_half_a_micro_batch_has_no_statistics():
    """The error of the half in training mode hid what was found before it, and the task was verified."""
    found = probe(lambda *given: F.cross_entropy(*given, weight=RARE), Normed, 2, ["1.running_mean"])
    assert (found.influence, found.why_not) == ("weights", "")


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(("judge", "expected"), [(deviating, "loss"), (over_the_frequent, "weights")])
def test_two_samples_are_compared_with_four_where_one_has_no_gradient(judge, expected):
    """It was verified: the cut into single samples was NaN, and nothing else was looked at."""
    assert influence(judge) == expected
    assert probe(judge).part_size == 2


def test_a_difference_is_a_share_where_single_samples_have_no_gradient_at_all():
    """It was written with 112 digits: a norm divided by 0."""
    found = probe(apart_from_the_mean)
    assert found.influence == "loss"
    assert found.difference == pytest.approx(1.0)


def test_a_slow_machine_sees_it_as_well(monkeypatch):
    """After 0.3 s no further micro-batch was cut, so that this mistake was found on quick machines alone."""
    monkeypatch.setattr(time, "monotonic", itertools.count(step=0.5).__next__)
    assert influence(lambda *given: F.cross_entropy(*given, weight=RARE)) == "weights"


def test_micro_batches_that_are_left_out_for_time_are_told_of(monkeypatch):
    monkeypatch.setattr(time, "monotonic", itertools.count(step=20.0).__next__)
    (said,) = probe(F.cross_entropy).cut_short
    assert said.startswith("micro-batches that are cut into samples: 1 were looked at within 10 s")


class Together(Judged):
    """Its outputs are what samples have to do with each other."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        return outputs @ outputs.T


class Hidden(Judged):
    """Its loss does not say what of the outputs it compares."""

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return negatives(model(batch[0]), batch[1])


def test_samples_that_meet_in_the_forward_are_no_mistake():
    assert influence(lambda scores, _: F.cross_entropy(scores, torch.arange(len(scores))), Together) == (
        "forward"
    )
    assert influence(lambda loss, _: loss, Hidden) == "unknown"


def drawing(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits + torch.randn_like(logits), classes)


counter = itertools.count()


def counting(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, classes) * next(counter)


@pytest.mark.parametrize(("judge", "why"), [(drawing, "draws random numbers"), (counting, "keeps state")])
def test_state_is_told_from_random_numbers(judge, why):
    """Only runs with two seeds were compared, and none with one: a counter was called random, too."""
    assert f"the loss of equal samples changes, as it {why}" in probe(judge).why_not
