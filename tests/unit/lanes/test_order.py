"""Every order gives each sample of an epoch once, whoever asks for which turn."""

import itertools

import pytest

from lanewise.lanes import FeistelOrder, LaneTurn, SampleOrder, Schedule, SequentialOrder, choose_order

SCHEDULE = Schedule(22, 8, 2)


def turns(first_step: int, last_step: int) -> list[LaneTurn]:
    return list(SCHEDULE.turns(range(4), first_step, last_step))


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_sample_once(shuffle: bool) -> None:
    order = choose_order(22, seed=3, shuffle=shuffle)
    for epoch in range(2):
        own = turns(epoch * 3, (epoch + 1) * 3)
        assert sorted(itertools.chain.from_iterable(map(order.samples, own))) == list(range(22))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_turn_has_the_same_samples_whatever_was_asked_before(shuffle: bool) -> None:
    one = choose_order(22, seed=3, shuffle=shuffle)
    samples = {turn: one.samples(turn) for turn in turns(0, 6)}
    for turn, expected in reversed(samples.items()):
        assert one.samples(turn) == expected
        assert choose_order(22, seed=3, shuffle=shuffle).samples(turn) == expected


def test_without_shuffling_every_epoch_is_the_dataset_from_first_to_last() -> None:
    order = SequentialOrder()
    assert [order.samples(turn) for turn in turns(5, 6)] == [(16, 17), (18, 19), (20, 21)]


def test_a_lane_without_positions_has_no_samples() -> None:
    (turn,) = SCHEDULE.turns(range(3, 4), 2, 3)
    orders: list[SampleOrder] = [FeistelOrder(22, seed=0), SequentialOrder()]
    assert [order.samples(turn) for order in orders] == [(), ()]


def test_the_samples_of_a_turn_are_plain_integers() -> None:
    (turn,) = SCHEDULE.turns(range(1, 2), 0, 1)
    assert {type(index) for index in FeistelOrder(22, seed=0).samples(turn)} == {int}
