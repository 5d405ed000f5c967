"""Tests for lanewise.adapt.loss."""

from itertools import chain
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lanewise.adapt.loss import LossObserver, rows, spread_samples


class Pair(NamedTuple):
    images: torch.Tensor
    labels: list


def test_a_row_of_a_batch_is_a_batch_with_the_same_padding():
    batch = {
        "pair": Pair(torch.arange(6).view(3, 2), ["a", "b", "c"]),
        "both": (torch.zeros(3), torch.ones(3, 1)),
        "scale": torch.tensor(2.0),
        "shared": torch.ones(5),
        "flag": True,
    }
    found = rows(batch, 3, 1)
    assert found["pair"].images.tolist() == [[2, 3]]
    assert found["pair"].labels == ["b"]
    assert [part.shape for part in found["both"]] == [(1,), (1, 1)]
    assert (found["scale"], len(found["shared"]), found["flag"]) == (2.0, 5, True)


def test_a_list_of_other_things_and_a_dataclass_of_tensors_are_cut_too():
    both = rows({"texts": ["a", "b"], "sizes": [1, 2, 3]}, 2, 1)
    assert both == {"texts": ["b"], "sizes": [1, 2, 3]}


def test_a_few_samples_are_looked_at_in_small_micro_batches():
    assert sorted(chain.from_iterable(spread_samples(range(7), 3))) == list(range(7))
    assert [len(samples) for samples in spread_samples(range(7), 3)] == [3, 3, 1]
    assert [len(samples) for samples in spread_samples(range(999), 64)] == [8] * 8
    assert [len(samples) for samples in spread_samples(range(999), 3)] == [3] * 21 + [1]
    assert list(spread_samples([], 4)) == []


@pytest.mark.parametrize("classes", [torch.arange(800) // 400, torch.arange(800) % 2, torch.arange(800) // 8])
def test_of_samples_that_are_sorted_or_take_turns_there_are_several_classes(classes):
    """The first 32 were looked at; where they are of one class, class weights make no difference."""
    found = list(spread_samples(classes, 4))
    assert sum(len(set(map(int, samples))) > 1 for samples in found) >= 12
    assert list(map(list, found)) == list(map(list, spread_samples(classes, 4)))


def test_sums_are_equal_within_the_rounding_of_the_weights():
    """Losses of a model in bfloat16 were refused, as if they were no means."""
    observer = LossObserver(nn.Linear(1, 1))
    assert observer.is_sum_of_parts(1.0, [0.5, 0.50001])
    assert not observer.is_sum_of_parts(1.0, [0.5, 0.51])
    assert observer.is_sum_of_parts(0.0, [])
    assert not observer.is_sum_of_parts(float("nan"), [1.0])
    observer = LossObserver(nn.Linear(1, 1).bfloat16())
    assert observer.is_sum_of_parts(1.0, [0.5, 0.51])
    assert not observer.is_sum_of_parts(1.0, [0.5, 0.55])


OUTPUTS, CLASSES, WEIGHT = torch.randn(4, 3), torch.ones(4, dtype=torch.int64), torch.tensor([1.0, 9.0, 2.0])
SAID = {
    "its cross_entropy has a weight": lambda: nn.CrossEntropyLoss(WEIGHT)(OUTPUTS, CLASSES),
    "its nll_loss has a weight": lambda: F.nll_loss(OUTPUTS, CLASSES, WEIGHT),
    "its mse_loss has a weight": lambda: F.mse_loss(OUTPUTS, OUTPUTS, weight=OUTPUTS),
    "its cross_entropy has ignore_index=0": lambda: F.cross_entropy(OUTPUTS, CLASSES, ignore_index=0),
    "": lambda: (
        F.cross_entropy(OUTPUTS, CLASSES)
        + F.cross_entropy(OUTPUTS, CLASSES, torch.ones(3))
        + F.cross_entropy(OUTPUTS, CLASSES, WEIGHT, reduction="sum")
        + F.cross_entropy(OUTPUTS, CLASSES, ignore_index=255)
        + F.cross_entropy(OUTPUTS, CLASSES, ignore_index=3)  # question answering clamps positions to it
        + F.binary_cross_entropy_with_logits(OUTPUTS, OUTPUTS, WEIGHT, pos_weight=WEIGHT)
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_what_a_loss_is_told_is_noted_where_its_mean_is_none_over_all_targets(said):
    """Of samples of one class a mean by class weights has the value of a plain one."""
    with LossObserver(nn.Linear(1, 1)) as observer:
        SAID[said]()
    assert [text.removeprefix(", as ") for text in observer.reasons] == [said] * bool(said)
