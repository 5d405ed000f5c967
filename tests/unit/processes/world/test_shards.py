"""Tensors of which each process has a part: gathered, laid out, and cut as torch cuts them."""

import pytest
import torch

from lanewise.processes.world.shards import is_sharded, laid_out_as, row_ranges, whole
from lanewise.testing import run_distributed
from tests.slow import slow

SHAPES = [(8, 3), (7, 2), (5,), (2, 2), (1,), (0, 4)]


def test_a_plain_tensor_is_whole():
    tensor = torch.ones(3)
    assert not is_sharded(tensor)
    assert not is_sharded("full_tensor")
    assert whole(tensor) is tensor


def test_a_plain_tensor_is_laid_out_in_memory_as_another():
    like = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = torch.arange(120, dtype=torch.float64).view(2, 3, 4, 5)
    laid_out = laid_out_as(value, like)
    assert laid_out.stride() == like.stride()
    assert laid_out.dtype == torch.float64
    assert torch.equal(laid_out, value)


def cut_and_gather(world, shape):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (world.world_size,))
    like = zeros(*shape, device_mesh=mesh, placements=[Shard(0)])
    value = torch.arange(like.numel()).view(shape)
    sharded = laid_out_as(value, like)
    assert is_sharded(sharded)
    own = row_ranges(sharded)[world.rank]
    assert torch.equal(sharded.to_local(), value[own.start : own.stop])
    assert torch.equal(whole(sharded), value)
    return row_ranges(sharded)


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
def test_a_sharded_tensor_is_cut_without_talking_and_gathered(world_size):
    for shape in SHAPES:
        (ranges, *others) = run_distributed(cut_and_gather, world_size, shape)
        assert all(other == ranges for other in others)
        assert [row for rows in ranges for row in rows] == list(range(shape[0]))
