"""Tests for lanewise.adapt.loss."""

from typing import NamedTuple

import torch
from torch import nn

from lanewise.adapt.loss import first_samples, looking, rows


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


def test_a_few_small_micro_batches_are_looked_at():
    assert list(first_samples(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(first_samples(range(99), 2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(samples) for samples in first_samples(range(99), 64)] == [8] * 4
    assert list(first_samples([], 4)) == []


def test_sums_are_equal_within_the_rounding_of_the_weights():
    """Losses of a model in bfloat16 were refused, as if they were no means."""
    with looking(nn.Linear(1, 1)) as is_sum_of_parts:
        assert is_sum_of_parts(1.0, [0.5, 0.50001])
        assert not is_sum_of_parts(1.0, [0.5, 0.51])
        assert is_sum_of_parts(0.0, [])
        assert not is_sum_of_parts(float("nan"), [1.0])
    with looking(nn.Linear(1, 1).bfloat16()) as is_sum_of_parts:
        assert is_sum_of_parts(1.0, [0.5, 0.51])
        assert not is_sum_of_parts(1.0, [0.5, 0.55])


def test_looking_leaves_the_modes_and_the_random_state():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2).eval())
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    with looking(model):
        assert not model[0].training
        assert not torch.is_grad_enabled()
        torch.rand(3)
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), expected)
