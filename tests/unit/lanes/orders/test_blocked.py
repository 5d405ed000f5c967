"""Lanes read blocks of their own, mix what is open, and no step depends on who else reads."""

import itertools
from collections import defaultdict

import numpy as np
import pytest

from lanewise.errors import ConfigError, DataError
from lanewise.lanes import BlockedOrder, OrderInputs, Schedule

EACH_ALONE = [range(lane, lane + 1) for lane in range(8)]


def make(block_sizes, global_batch_size=32, micro_batch_size=4, **options) -> BlockedOrder:
    schedule = Schedule(int(np.sum(block_sizes)), global_batch_size, micro_batch_size)
    return BlockedOrder(OrderInputs(schedule, 5, {"block_sizes": lambda: block_sizes}), **options)


def lane_samples(order: BlockedOrder, lane: int, epoch: int = 0) -> list[int]:
    schedule = order.schedule
    steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
    own = schedule.turns(range(lane, lane + 1), steps.start, steps.stop)
    return list(itertools.chain.from_iterable(map(order.samples, own)))


def test_a_block_is_read_by_one_lane_but_at_the_borders():
    sizes = np.random.default_rng(0).integers(1, 60, 200)
    order = make(sizes)
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    lanes = defaultdict(set)
    for lane in range(8):
        for sample in lane_samples(order, lane):
            lanes[block_of[sample]].add(lane)
    assert len(lanes) == 200
    assert sum(len(readers) - 1 for readers in lanes.values()) <= 7
    assert order.read_factor(EACH_ALONE) < 1.05
    assert order.read_factor([range(8)]) == 1


def test_a_block_is_read_forward_in_windows():
    """So a process needs to keep two windows of a block, and never the whole of it."""
    sizes, window = [2000] * 64, 32
    order = make(sizes, window=window)
    for lane in (0, 7):
        place = defaultdict(list)
        for sample in lane_samples(order, lane):
            place[sample // 2000].append(sample % 2000)
        for rows in place.values():
            ahead = np.array(rows) - np.maximum.accumulate(rows)
            assert ahead.min() > -2 * window
            assert len(rows) < 100 or ahead.min() < 0  # but they are shuffled


def test_rows_of_all_strands_come_in_every_step():
    """Sorted by class, a file must not give steps of one class."""
    order = make([100] * 80, global_batch_size=64, micro_batch_size=64)
    blocks = [
        len({sample // 100 for sample in samples})
        for samples in np.split(np.array(lane_samples(order, 0)), 125)
    ]
    assert min(blocks) >= 40


@pytest.mark.parametrize("num_blocks", [1, 3, 64, 65, 500])
def test_rows_stay_a_shuffle_with_few_and_with_many_blocks(num_blocks):
    sizes = np.full(num_blocks, 6400 // num_blocks)
    sizes[-1] += 6400 - sizes.sum()
    samples = np.array(lane_samples(make(sizes, 64, 64), 0))
    correlation = np.corrcoef(samples, np.arange(len(samples)))[0, 1]
    assert abs(correlation) < 0.1


def test_a_billion_rows_are_ordered_at_once():
    order = make(np.full(1000, 10**6), 512, 64)
    (turn,) = order.schedule.turns(range(3, 4), 10**6, 10**6 + 1)
    assert len(set(order.samples(turn))) == 64


def test_few_blocks_are_read_by_several_lanes_and_that_is_told():
    order = make([1000, 1000])
    assert order.read_factor(EACH_ALONE) > 2
    assert order.read_factor([range(8)]) == 1


def test_mistakes_are_told():
    with pytest.raises(ConfigError, match="window must be at least 1: got 0"):
        make([10], 5, 5, window=0)
    with pytest.raises(DataError, match="must add up to the 12 samples of the dataset: got 11 in 2 blocks"):
        BlockedOrder(OrderInputs(Schedule(12, 4, 2), 0, {"block_sizes": lambda: [5, 6]}))


def test_the_order_is_what_it_was():
    """Saved runs go on with it, so it must never change."""
    order = make([5, 0, 7, 11, 3], 8, 2)
    assert [lane_samples(order, lane) for lane in range(4)] == GOLDEN


GOLDEN = [
    [5, 6, 7, 8, 9, 10, 11, 23],
    [24, 25, 0, 1, 2, 3],
    [4, 12, 13, 14, 15, 16],
    [17, 18, 19, 20, 21, 22],
]
