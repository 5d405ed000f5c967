"""Samples of like lengths come together, and nothing else changes."""

import itertools

import numpy as np
import pytest

from lanewise.errors import ConfigError, DataError
from lanewise.lanes import BucketedOrder, OrderInputs, Schedule, ShuffledOrder

LENGTHS = np.random.default_rng(0).geometric(0.02, 3000)


def make(schedule: Schedule, **options) -> BucketedOrder:
    return BucketedOrder(OrderInputs(schedule, 5, {"sample_lengths": lambda: LENGTHS}), **options)


def micro_batches(order, epoch: int = 0) -> dict[int, list[tuple[int, ...]]]:
    """Return the samples of the lanes, by step."""
    schedule = order.schedule
    first, last = epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch
    own = schedule.turns(range(schedule.num_lanes), first, last)
    by_step = itertools.groupby(own, key=lambda turn: turn.step)
    return {step: [order.samples(turn) for turn in of_step] for step, of_step in by_step}


def tokens(batches) -> list[int]:
    """Return the tokens of each micro-batch, its padding counted."""
    return [
        len(samples) * LENGTHS[list(samples)].max() for of_step in batches.values() for samples in of_step
    ]


SCHEDULE = Schedule(3000, 64, 16)


def test_little_is_padded():
    shuffled = micro_batches(ShuffledOrder(OrderInputs(SCHEDULE, 5)))
    bucketed = micro_batches(make(SCHEDULE))
    assert LENGTHS.sum() / sum(tokens(shuffled)) < 0.4
    assert LENGTHS.sum() / sum(tokens(bucketed)) > 0.9


def test_the_lanes_of_a_step_have_like_lengths_and_none_always_the_shortest():
    batches = micro_batches(make(SCHEDULE))
    means = np.array(
        [[LENGTHS[list(samples)].mean() for samples in of_step] for of_step in batches.values()][:-1]
    )
    assert np.median(means.max(axis=1) / means.min(axis=1)) < 1.5
    assert all(0.1 < share < 0.45 for share in np.bincount(means.argmin(axis=1), minlength=4) / len(means))


def test_steps_do_not_come_by_length():
    batches = micro_batches(make(SCHEDULE))
    means = [LENGTHS[list(itertools.chain.from_iterable(of_step))].mean() for of_step in batches.values()]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.5


def test_noise_brings_other_samples_together_in_each_epoch():
    order = make(Schedule(3000, 3000, 100), window_steps=1)
    of_epochs = [{frozenset(samples) for samples in micro_batches(order, epoch)[epoch]} for epoch in range(2)]
    assert not of_epochs[0] & of_epochs[1]


def test_a_token_budget_makes_micro_batches_of_like_size():
    by_samples, by_tokens = micro_batches(make(SCHEDULE)), micro_batches(make(SCHEDULE, max_tokens=2000))
    assert max(tokens(by_samples)) > 3000
    assert max(tokens(by_tokens)) <= 2000
    assert [len(of_step) for of_step in by_tokens.values()] == [
        len(of_step) for of_step in by_samples.values()
    ]


@pytest.mark.parametrize(
    ("options", "error", "mistake"),
    [
        ({"window_steps": 0}, ConfigError, "window_steps must be at least 1: got 0"),
        ({"noise": -0.5}, ConfigError, "noise must be at least 0: got -0.5"),
        ({"max_tokens": 100}, DataError, "sample 764 alone has 404 tokens, and .*max_tokens is 100"),
        ({"max_tokens": 500}, DataError, "needs [0-9]+ tokens, its padding counted, and .*max_tokens is 500"),
    ],
)
def test_mistakes_are_told(options, error, mistake):
    with pytest.raises(error, match=mistake):
        micro_batches(make(SCHEDULE, **options))
