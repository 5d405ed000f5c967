"""The sums of `exact` under FSDP, as FSDP asks for them."""

import pytest
import torch
import torch.distributed as dist

from lanewise.lanes import Placement, lane_ranges
from lanewise.reduce.tree_reduce_scatter import TreeReduceScatter
from lanewise.testing import run_distributed
from tests.unit.reduce.lanes import cancelling, in_tree

SIZE = 12
"""Elements of the gradient, cut evenly among 2, 3 and 4 processes."""


def sum_lanes(world, num_lanes, num_present):
    """Return this process's row of the sum."""
    sums = TreeReduceScatter(Placement.of(num_lanes, world))
    ranges = lane_ranges(num_lanes, world.world_size)
    rows = []
    for number in range(len(ranges[0])):
        lane = ranges[world.rank].start + number
        is_present = lane in ranges[world.rank] and lane < num_present
        gradient = cancelling(lane, SIZE) if is_present else torch.full((SIZE,), torch.nan)
        rows.append(torch.empty(SIZE // world.world_size))
        sums(rows[-1], gradient, dist.group.WORLD, None)
        sums.push(num_present)
    sums.finish()
    return rows[0].numpy().tobytes()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("num_lanes", "num_present"), [(4, 4), (8, 8), (7, 7), (8, 3), (6, 2)])
def test_each_process_has_its_rows_of_the_sum_in_the_tree(world_size, num_lanes, num_present):
    """A process without a lane sends what is no number, and nobody looks at it."""
    (expected,) = in_tree(cancelling, [SIZE], num_lanes, num_present)
    rows = run_distributed(sum_lanes, world_size, num_lanes, num_present)
    assert b"".join(rows) == expected.numpy().tobytes()


def negative_zeros(world):
    sums = TreeReduceScatter(Placement(lane_ranges(2, 2), 0))
    row = torch.empty(2)
    for part in ([0.0, 0.0, 0.0, 0.0], [-0.0, 0.0, 3.0, -0.0], [0.0, 0.0, 0.0, 0.0]):
        sums(row, torch.tensor(part), dist.group.WORLD, None)
    sums.push(2)
    sums.finish()
    return row.tolist()


def test_the_zeros_that_fsdp_sends_for_other_runs_of_a_block_keep_the_sign_of_a_zero():
    assert repr(run_distributed(negative_zeros, 2)) == repr([[-0.0, 0.0], [6.0, -0.0]])
