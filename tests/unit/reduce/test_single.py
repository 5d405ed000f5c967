"""The reducer of one process."""

import pytest
import torch

from lanewise.testing import run_distributed
from tests.unit.reduce.lanes import cancelling, in_tree, reduce_lanes

SIZES = [3, 100]


def run(world, equality, num_lanes, present):
    return reduce_lanes(world, cancelling, SIZES, equality=equality, num_lanes=num_lanes, present=present)


@pytest.mark.parametrize(
    ("num_lanes", "present"), [(1, range(1)), (8, range(8)), (8, range(3)), (6, (0, 4, 5)), (7, range(5))]
)
def test_exact_adds_in_the_tree(num_lanes, present):
    result = run_distributed(run, 1, "exact", num_lanes, present)[0]
    expected = in_tree(cancelling, SIZES, num_lanes, present)
    assert [t.tolist() for t in result] == [t.tolist() for t in expected]


def test_close_adds_lane_after_lane():
    result = run_distributed(run, 1, "close", 8, range(8))[0]
    for gradient, size in zip(result, SIZES, strict=True):
        expected = torch.zeros(size)
        for lane in range(8):
            expected = expected + cancelling(lane, size)
        assert torch.equal(gradient, expected)
        assert not torch.equal(gradient, in_tree(cancelling, [size], 8, range(8))[0])
