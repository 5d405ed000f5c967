"""The all-reduce through shared memory: the bytes of one process that adds in the tree."""

import pytest
import torch

from lanewise.lanes import Placement, Present, lane_ranges
from lanewise.processes.world.world import World
from lanewise.reduce.shared_all_reduce import SharedAllReduce
from lanewise.testing import run_distributed
from tests.slow import slow
from tests.unit.reduce.lane_sums import tree_of

SMALL, LARGE = [1, 2, 1001], [5003, 1_100_000]
"""LARGE: in slices, and in pieces."""


def reduce_buckets(
    world: World, num_lanes: int, present: Present, sizes: list[int], dtype: torch.dtype
) -> list[bytes]:
    assert world.shared_memory is not None
    all_reduce = SharedAllReduce(world.shared_memory, Placement.of(num_lanes, world))
    lanes = lane_ranges(num_lanes, world.world_size)[world.rank]
    results = []
    for size in sizes:
        sums = [value.to(dtype) for _, (value,) in tree_of(lanes, num_lanes, present, size).pending]
        bucket = sums[-1] if sums else torch.full((size,), torch.nan, dtype=dtype)
        summed = all_reduce.start(sums, present, bucket).wait()
        assert summed is bucket
        results.append(summed.view(torch.uint8).numpy().tobytes())
    return results


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
@pytest.mark.parametrize(
    ("num_lanes", "present"),
    [(4, range(4)), (8, range(8)), (8, range(5)), (7, (1, 3, 6)), (7, range(2)), (12, range(11))],
)
def test_every_rank_gets_the_bytes_of_one_process(world_size, num_lanes, present):
    sizes = SMALL + LARGE if (num_lanes, present) == (12, range(11)) else [*SMALL, LARGE[0]]
    expected = [
        tree_of(range(num_lanes), num_lanes, present, size).root()[0].numpy().tobytes() for size in sizes
    ]
    for results in run_distributed(reduce_buckets, world_size, num_lanes, present, sizes, torch.float32):
        assert results == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_elements_of_any_size(dtype):
    """One lane in each process: what is sent is what would be added."""
    sizes = [3, 9001]
    expected = []
    for size in sizes:
        tree = [
            tree_of(range(lane, lane + 1), 2, range(2), size).pending[0][1][0].to(dtype) for lane in (0, 1)
        ]
        expected.append((tree[0] + tree[1]).view(torch.uint8).numpy().tobytes())
    for results in run_distributed(reduce_buckets, 2, 2, range(2), sizes, dtype):
        assert results == expected
