"""Channels between processes."""

import torch
import torch.distributed as dist

from lanewise.processes.world.world import LocalWorld
from lanewise.testing import run_distributed


def add_up(world):
    """Sum the ranks over groups of the first and the last two."""
    sums = []
    for ranks in ((0, 1), (1, 2)):
        group = world.new_group(ranks)
        total = torch.tensor([world.rank])
        if group is not None:
            dist.all_reduce(total, group=group)
        sums.append(None if group is None else int(total))
    return sums


def test_a_group_is_of_the_ranks_that_it_is_given_and_the_others_get_none():
    assert run_distributed(add_up, 3) == [[1, None], [1, 3], [None, 3]]


def test_one_process_alone_has_no_group():
    assert LocalWorld(torch.device("cpu")).new_group([0]) is None
