"""A model whose tensors are fake, and what the formulas need to know of its parameters."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

ROOT = 0
"""The group of the parameters that are in no block."""


class Weight(NamedTuple):
    """One parameter."""

    num_rows: int
    """The size of its first dimension, along which fsdp cuts it."""
    row_bytes: int
    is_trained: bool
    group: int
    """Which parameters fsdp gathers together: those of block 1, 2, ...; or `ROOT`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.num_rows * self.row_bytes

    def shard_bytes(self, num_shards: int) -> int:
        """Bytes of the largest part, which is that of rank 0; to that size all others are padded."""
        return -(-self.num_rows // num_shards) * self.row_bytes


def weights_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Weight]:
    """Describe the parameters of a model in their order.

    Args:
        model: the user's module.
        blocks: its blocks, those inside others first.
    """
    groups: dict[nn.Parameter, int] = {}
    for number, block in enumerate(blocks, 1):
        for parameter in block.parameters():
            groups.setdefault(parameter, number)
    weights = []
    for tensor in model.parameters():
        num_rows = tensor.shape[0] if tensor.dim() else 1
        weights.append(
            Weight(
                num_rows, tensor.nbytes // max(num_rows, 1), tensor.requires_grad, groups.get(tensor, ROOT)
            )
        )
    return weights


def with_tensors(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], *, makes_buffers: bool = True
) -> nn.Module:
    """Copy a module with other tensors in the places of its own.

    Args:
        model: stays as it is.
        make: gives the data of a parameter or buffer of the copy, from that of the model.
        makes_buffers: whether buffers are made too; else the copy shares those of the model.
    """
    memo: dict[int, object] = {
        id(buffer): make(buffer) if makes_buffers else buffer for buffer in model.buffers()
    }
    memo |= {id(weight): nn.Parameter(make(weight), weight.requires_grad) for weight in model.parameters()}
    return copy.deepcopy(model, memo)
