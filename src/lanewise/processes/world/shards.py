"""Tensors that are shared out among the processes.

Every process has a part of a sharded tensor. The reducer fsdp shards the parameters: they are torch's
DTensors, cut along the first dimension. What saves, compares or restores tensors knows nothing of DTensors
but the functions of this module. torch's module for them takes half a second to import, and is imported only
where there is such a tensor.

A held tensor is whole, and one process has it.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that one process has, in a state that has the same structure on all ranks."""

    tensor: torch.Tensor
    """The tensor itself; on the other ranks, one of the same shape and dtype on torch's meta device."""


def is_sharded(value: object) -> bool:
    """Tell whether this is a tensor of which each process has a part."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def is_cut_by_rows(tensor: Any) -> bool:
    """Tell whether a sharded tensor is cut along its first dimension alone."""
    return [getattr(placement, "dim", None) for placement in tensor.placements] == [0]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all processes.

    Collective where it is sharded: every rank must call this.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        # Parts in host memory travel through the GPU, as its backend sends nothing else.
        gathered: torch.Tensor = sharded.to(sharded.device_mesh.device_type).full_tensor()
    return gathered


def laid_out_as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of a whole tensor with the device, strides and sharding of another one.

    Args:
        value: equal on every rank; each process keeps its part.
        like: has the same shape, and may have another dtype.
    """
    sharded: Any = like
    if not is_sharded(like):
        return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - takes half a second

    # Without a source rank nothing is sent: each process cuts its part out of its own copy.
    parts = distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return parts.to(like.device)


def row_ranges(tensor: Any) -> list[range]:
    """Return which rows of a sharded tensor each rank has; the last ranks may have none."""
    num_rows, num_ranks = tensor.shape[0], tensor.device_mesh.size()
    size = -(-num_rows // num_ranks)
    starts = [min(rank * size, num_rows) for rank in range(num_ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
