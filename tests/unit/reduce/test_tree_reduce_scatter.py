"""The sums of `exact` under FSDP, as FSDP asks for them."""

import pytest
import torch
import torch.distributed as dist

from lanewise.lanes import Placement, lane_ranges
from lanewise.reduce.tree_reduce_scatter import TreeReduceScatter
from lanewise.testing import run_distributed
from tests.slow import slow
from tests.unit.reduce.lanes import cancelling, in_tree

SIZE = 12
"""Elements of the gradient, cut evenly among 2, 3 and 4 processes."""


def sum_lanes(world, num_lanes, present):
    """Return this process's row of the sum."""
    sums = TreeReduceScatter(Placement.of(num_lanes, world))
    ranges = lane_ranges(num_lanes, world.world_size)
    rows = []
    own = [lane for lane in ranges[world.rank] if lane in present]
    for number in range(len(ranges[0])):
        absent = torch.full((SIZE,), torch.nan)
        gradient = cancelling(own[number], SIZE) if number < len(own) else absent
        rows.append(torch.empty(SIZE // world.world_size))
        sums(rows[-1], gradient, dist.group.WORLD, None)
        sums.push(present)
    sums.finish()
    return rows[0].numpy().tobytes()


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
@pytest.mark.parametrize(
    ("num_lanes", "present"),
    [(4, range(4)), (8, range(8)), (7, range(7)), (8, range(3)), (6, range(2)), (8, (1, 2, 7))],
)
def test_each_process_has_its_rows_of_the_sum_in_the_tree(world_size, num_lanes, present):
    """A process without a lane sends what is no number, and nobody looks at it."""
    (expected,) = in_tree(cancelling, [SIZE], num_lanes, present)
    rows = run_distributed(sum_lanes, world_size, num_lanes, present)
    assert b"".join(rows) == expected.numpy().tobytes()


def negative_zeros(world):
    sums = TreeReduceScatter(Placement(lane_ranges(2, 2), 0))
    row = torch.empty(2)
    for part in ([0.0, 0.0, 0.0, 0.0], [-0.0, 0.0, 3.0, -0.0], [0.0, 0.0, 0.0, 0.0]):
        sums(row, torch.tensor(part), dist.group.WORLD, None)
    sums.push(range(2))
    sums.finish()
    return row.tolist()


def test_the_zeros_that_fsdp_sends_for_other_runs_of_a_block_keep_the_sign_of_a_zero():
    assert repr(run_distributed(negative_zeros, 2)) == repr([[-0.0, 0.0], [6.0, -0.0]])
