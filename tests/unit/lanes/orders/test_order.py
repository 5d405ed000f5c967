"""Every order gives each sample of an epoch once, whoever asks for which turn."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.errors import DataError
from lanewise.lanes import (
    BlockedOrder,
    BucketedOrder,
    LaneTurn,
    OrderInputs,
    SampleOrder,
    Schedule,
    SequentialOrder,
    ShuffledOrder,
    WeightedOrder,
)

SCHEDULE = Schedule(22, 8, 2)


def without_replacement(inputs: OrderInputs) -> SampleOrder:
    return WeightedOrder(inputs, replacement=False)


def by_tokens(inputs: OrderInputs) -> SampleOrder:
    return BucketedOrder(inputs, window_steps=2, max_tokens=10**6)


ORDERS = [SequentialOrder, ShuffledOrder, BlockedOrder, BucketedOrder, by_tokens, without_replacement]
orders = pytest.mark.parametrize("make", ORDERS)


def inputs_for(schedule: Schedule, seed: int = 3) -> OrderInputs:
    """Whatever an order may ask for: uneven blocks, some of them empty, lengths and weights."""
    num_samples = schedule.num_samples
    draws = np.random.default_rng(num_samples)
    borders = np.sort(draws.integers(0, num_samples + 1, 5))
    tables = {
        "block_sizes": np.diff(np.concatenate([[0], borders, [num_samples]])),
        "sample_lengths": draws.integers(0, 50, num_samples),
        "sample_weights": draws.random(num_samples) + 0.1,
    }
    return OrderInputs(schedule, seed, {name: lambda table=table: table for name, table in tables.items()})


def turns(schedule: Schedule, first_step: int, last_step: int) -> list[LaneTurn]:
    return list(schedule.turns(range(schedule.num_lanes), first_step, last_step))


schedules = st.builds(
    lambda num_samples, num_lanes, micro, drop_last: Schedule(
        max(num_samples, num_lanes * micro), num_lanes * micro, micro, drop_last
    ),
    st.integers(1, 300),
    st.integers(1, 9),
    st.integers(1, 7),
    st.booleans(),
)


@orders
@given(schedule=schedules, epoch=st.integers(0, 3), seed=st.integers(0, 2**63))
def test_an_epoch_has_every_sample_once(make: Callable[..., SampleOrder], schedule, epoch, seed) -> None:
    order = make(inputs_for(schedule, seed))
    own = turns(schedule, epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
    given_samples = list(map(order.samples, own))
    assert all(given_samples)
    samples = list(itertools.chain.from_iterable(given_samples))
    assert len(samples) == len(set(samples))
    assert set(samples) <= set(range(schedule.num_samples))
    if not schedule.drop_last:
        assert len(samples) == schedule.num_samples
    elif make is not by_tokens:
        assert len(samples) == schedule.steps_per_epoch * schedule.global_batch_size


@orders
def test_a_turn_has_the_same_samples_whatever_was_asked_before(make: Callable[..., SampleOrder]) -> None:
    order = make(inputs_for(SCHEDULE))
    samples = {turn: order.samples(turn) for turn in turns(SCHEDULE, 0, 6)}
    for turn, expected in reversed(samples.items()):
        assert order.samples(turn) == expected
        assert make(inputs_for(SCHEDULE)).samples(turn) == expected
        assert {type(index) for index in expected} == {int}


@pytest.mark.parametrize("make", [ShuffledOrder, BlockedOrder, BucketedOrder, WeightedOrder])
def test_other_epochs_and_seeds_have_other_orders(make: Callable[..., SampleOrder]) -> None:
    schedule = Schedule(400, 8, 2)
    found = {
        tuple(itertools.chain.from_iterable(map(make(inputs_for(schedule, seed)).samples, own)))
        for seed in range(3)
        for own in (turns(schedule, 0, 50), turns(schedule, 50, 100))
    }
    assert len(found) == 6


def test_without_shuffling_every_epoch_is_the_dataset_from_first_to_last() -> None:
    order = SequentialOrder(inputs_for(SCHEDULE))
    assert [order.samples(turn) for turn in turns(SCHEDULE, 5, 6)] == [(16, 17), (18, 19), (20, 21)]


@orders
def test_a_lane_without_positions_has_no_samples(make: Callable[..., SampleOrder]) -> None:
    (turn,) = SCHEDULE.turns(range(3, 4), 2, 3)
    assert make(inputs_for(SCHEDULE)).samples(turn) == ()


@pytest.mark.parametrize(
    ("table", "mistake"),
    [
        (None, "needs sample_lengths, which is not given"),
        ([[1.0]], r"must be a sequence of numbers: got float64 of shape \(1, 1\)"),
        (["a"] * 22, "must be a sequence of numbers: got <U1"),
        ([float("nan")] * 22, "must be finite and not negative: got nan for 0, and 21 more"),
        ([3] * 21 + [-1], "must be finite and not negative: got -1 for 21, and 0 more"),
        ([3] * 21, "one number for each of the 22 samples: got 21"),
    ],
)
def test_a_table_that_is_none_is_told(table, mistake) -> None:
    tables = {} if table is None else {"sample_lengths": lambda: table}
    with pytest.raises(DataError, match=mistake):
        BucketedOrder(OrderInputs(SCHEDULE, 0, tables))
