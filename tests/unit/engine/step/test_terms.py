"""What a loss may report besides itself, and what is said of mistakes."""

import math

import pytest
import torch

from lanewise import Loss
from lanewise.engine.step.terms import LaneLoss, metric_terms, require_weight
from lanewise.engine.step.wire import Term
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn

ONE = torch.tensor(3.0, requires_grad=True)


def test_numbers_and_scalar_tensors_are_accepted_and_lose_their_gradient():
    given = {
        "a": (torch.tensor([2.0], requires_grad=True) * 2, torch.tensor(3)),
        "b": [1, True],
        "c": (torch.tensor(0.5, dtype=torch.bfloat16), 2.0),
    }
    terms = metric_terms(given, "the loss")
    assert not terms["a"].value.requires_grad
    assert terms["a"].value.dim() == 0
    assert terms == {"a": Term(4.0, 3.0), "b": Term(1.0, 1.0), "c": Term(0.5, 2.0)}


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


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_cannot_be_is_refused(weight):
    with pytest.raises(TaskError, match=r"the metric a of the loss has the weight .*: need a finite number"):
        require_weight("a", weight)


def test_a_finite_sum_counts_whatever_its_weight():
    """A picture of background was dropped with its loss."""
    loss = LaneLoss.of(Loss(ONE * 2, 0), 4, "the loss")
    alone = LaneTurn(0, 0, 0, range(4), present=range(1), is_last=True)
    root, factor = loss.root(alone, 8.0)
    assert (loss.sum, loss.weight, root, factor) == (6.0, 0.0, 6.0, 8.0)


@pytest.mark.parametrize(
    "loss", [Loss(ONE * math.nan, 0), Loss(ONE * math.inf, 0), Loss(ONE.detach(), 0), Loss.mean(ONE / 0, 0)]
)
def test_of_weight_0_a_sum_without_a_value_or_a_gradient_is_nothing(loss):
    assert LaneLoss.of(loss, 4, "the loss").sum is None


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_mean_over_nothing_adds_nothing(is_trained):
    with torch.set_grad_enabled(is_trained):
        assert not LaneLoss.of(Loss.mean(ONE * 1, torch.tensor(0)), 4, "the loss").sum


@pytest.mark.parametrize("count", [4, torch.tensor(4.0)])
def test_a_sum_and_a_weight_that_are_swapped_are_named(count):
    """Of one torch warned, and both said something of the sum alone."""
    swapped = Loss(count, torch.ones(4, requires_grad=True).sum())
    with pytest.raises(TaskError, match=r"whose weight has a gradient .* swapped\. Return Loss\(sum"):
        LaneLoss.of(swapped, 4, "the loss")
