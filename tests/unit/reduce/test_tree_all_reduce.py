"""The all-reduce of `exact`: the bytes of one process that adds in the tree, whoever carries the lanes."""

import time
from functools import partial

import pytest
import torch

from lanewise.lanes import Placement, Present, lane_ranges
from lanewise.processes.world.world import World
from lanewise.reduce.tree_all_reduce import TreeAllReduce
from lanewise.testing import run_distributed
from tests.slow import slow
from tests.unit.reduce.lane_sums import lane_values, tree_of


def reduce_buckets(world: World, num_lanes: int, present: Present, sizes: list[int]) -> list[torch.Tensor]:
    tree = TreeAllReduce(world, Placement.of(num_lanes, world))
    lanes = lane_ranges(num_lanes, world.world_size)[world.rank]
    futures = []
    for size in sizes:
        sums = [value for _, (value,) in tree_of(lanes, num_lanes, present, size).pending]
        bucket = sums[-1] if sums else torch.full((size,), torch.nan)
        futures.append(tree.start(sums, present, bucket))
    results = [future.wait().clone() for future in futures]
    tree.close()
    return results


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
@pytest.mark.parametrize(
    ("num_lanes", "present"),
    [(4, range(4)), (8, range(8)), (8, range(5)), (7, (1, 3, 6)), (7, range(2)), (12, range(11))],
)
def test_every_rank_gets_the_bytes_of_one_process(world_size, num_lanes, present):
    sizes = [1, 2, 3, 1000, 1001]
    expected = [tree_of(range(num_lanes), num_lanes, present, size).root()[0] for size in sizes]
    for results in run_distributed(reduce_buckets, world_size, num_lanes, present, sizes):
        for result, value in zip(results, expected, strict=True):
            assert result.numpy().tobytes() == value.numpy().tobytes()


def test_the_values_tell_the_order():
    in_sequence = lane_values(0, 1000)
    for lane in range(1, 8):
        in_sequence = in_sequence + lane_values(lane, 1000)
    assert not torch.equal(in_sequence, tree_of(range(8), 8, range(8), 1000).root()[0])


def lives_on(world):
    tree = TreeAllReduce(world, Placement.of(world.world_size, world))
    tree.start([torch.ones(4)], range(world.world_size), torch.ones(4)).wait()
    tree._jobs.put(partial(time.sleep, 1.5))  # as on a machine with too much to do
    tree.close()
    return tree._thread.is_alive()


def test_its_thread_is_waited_for_however_long_it_takes_to_end():
    assert run_distributed(lives_on, 2) == [False, False]
