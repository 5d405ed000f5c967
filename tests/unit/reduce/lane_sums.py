"""Values of lanes whose sum tells the order of its additions."""

import torch

from lanewise.lanes import Present, TreeSum
from lanewise.reduce.pending import add_into_right


def lane_values(lane: int, size: int) -> torch.Tensor:
    """Values of very different sizes: any other order of the additions gives other bytes."""
    generator = torch.Generator().manual_seed(lane)
    exponent = torch.randint(-8, 9, (size,), generator=generator)
    return torch.randn(size, generator=generator) * 10.0**exponent


def tree_of(lanes: range, num_lanes: int, present: Present, size: int) -> TreeSum[list[torch.Tensor]]:
    """Add up lanes as far as the tree allows."""
    tree_sum: TreeSum[list[torch.Tensor]] = TreeSum(num_lanes, present, add_into_right)
    for lane in lanes:
        if lane in present:
            tree_sum.push((lane, lane + 1), [lane_values(lane, size)])
    return tree_sum
