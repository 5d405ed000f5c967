"""Tensors that are shared out among the processes.

Of a sharded tensor every process has a part: the reducer fsdp makes such ones of parameters. They are torch's
DTensors, cut along the first dimension. Whoever saves, compares or restores tensors asks here, and needs to
know no more about them. torch's own module is imported where there is such a tensor only: it takes half a
second.

A held tensor is whole, and one process has it.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that one process has, as a part of a state that all ranks describe alike."""

    tensor: torch.Tensor
    """On the other ranks one of the same shape and dtype, on torch's meta device."""


def is_sharded(value: object) -> bool:
    """Tell whether this is a tensor of which each process has a part."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def is_cut_by_rows(tensor: Any) -> bool:
    """Tell whether a sharded tensor is cut along its first dimension, and no other way."""
    return [getattr(placement, "dim", None) for placement in tensor.placements] == [0]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all processes.

    Collective where it is sharded: every rank must call this.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        # Parts in host memory travel by way of the GPU, as its backend knows no other.
        gathered: torch.Tensor = sharded.to(sharded.device_mesh.device_type).full_tensor()
    return gathered


def laid_out_as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor's elements where and how another one has its own; each process keeps its part.

    Args:
        value: equal on every rank.
        like: of the same shape; gives device, order in memory and sharding, but not the dtype.
    """
    sharded: Any = like
    if not is_sharded(like):
        return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - takes half a second

    # Without a source rank nothing travels: each process cuts its part out of its own copy.
    parts = distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return parts.to(like.device)


def row_ranges(tensor: Any) -> list[range]:
    """Return which rows of a sharded tensor each rank has; the last ranks may have none."""
    num_rows, num_ranks = tensor.shape[0], tensor.device_mesh.size()
    size = -(-num_rows // num_ranks)
    starts = [min(rank * size, num_rows) for rank in range(num_ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
