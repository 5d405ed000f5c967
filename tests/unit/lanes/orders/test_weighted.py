"""Samples come as often, or as early, as their weights say."""

import itertools

import numpy as np
import pytest

from lanewise.errors import ConfigError, DataError
from lanewise.lanes import OrderInputs, Schedule, WeightedOrder
from lanewise.lanes.orders.weighted import _minus_log

WEIGHTS = np.array([0.0, 1.0, 2.0, 3.0, 4.0] * 20)


def make(weights=WEIGHTS, num_lanes: int = 2, **options) -> WeightedOrder:
    schedule = Schedule(len(weights), num_lanes * 5, 5)
    return WeightedOrder(OrderInputs(schedule, 5, {"sample_weights": lambda: weights}), **options)


def epoch_samples(order: WeightedOrder, epoch: int) -> list[int]:
    schedule = order.schedule
    first, last = epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch
    return list(itertools.chain.from_iterable(map(order.samples, schedule.turns(range(2), first, last))))


def test_with_replacement_samples_come_in_proportion_to_their_weights():
    order = make()
    counts = np.bincount(
        [sample for epoch in range(200) for sample in epoch_samples(order, epoch)], minlength=100
    )
    by_weight = [counts[weight == WEIGHTS].sum() / 20_000 for weight in range(5)]
    assert by_weight == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4], abs=0.02)
    assert order.repeats


def test_without_replacement_no_sample_comes_twice_and_the_first_comes_by_its_weight():
    order = make(replacement=False, num_samples=40)
    assert not order.repeats
    assert order.schedule.num_samples == 40
    epochs = [epoch_samples(order, epoch) for epoch in range(400)]
    assert all(len(set(samples)) == len(samples) == 40 for samples in epochs)
    first = np.bincount(
        [WEIGHTS[sample].astype(int) for samples in epochs for sample in samples[:2]], minlength=5
    )
    assert first / 800 == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4], abs=0.06)


def test_the_logarithm_is_one():
    values = np.concatenate([np.random.default_rng(0).random(10_000), [2.0**-53, 0.5, 1 - 2.0**-53]])
    assert _minus_log(values) == pytest.approx(-np.log(values), abs=1e-9)


@pytest.mark.parametrize(
    ("weights", "options", "error", "mistake"),
    [
        ([0.0] * 10, {}, DataError, "sample_weights has 0 positive weights"),
        (WEIGHTS, {"replacement": False}, DataError, "draws 100 samples without replacement, and .* has 80"),
        (WEIGHTS, {"num_samples": 0}, ConfigError, "num_samples must be at least 1: got 0"),
    ],
)
def test_mistakes_are_told(weights, options, error, mistake):
    with pytest.raises(error, match=mistake):
        make(weights, **options)
