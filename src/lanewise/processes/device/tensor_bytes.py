"""The bytes of a tensor's elements, as they are hashed, written and added up."""

import numpy as np
import torch

_PART = 2**18
"""How many elements are added up at once: `sum` copies them as int64."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""The integers as which elements are read, by the bytes of an element; wider elements are read as int64."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements in the order of their indices; of a contiguous tensor on the CPU its own memory.

    `Tensor.numpy` would return the same, but torch cannot resize the storage of the tensor after that.

    Raises:
        RuntimeError: if the elements cannot be read, such as those of a meta tensor.
        TypeError: if the tensor stands for others, such as a fake tensor.
    """
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"a {type(tensor).__name__} has no memory of its own")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    return np.from_dlpack(flat.view(torch.uint8)).data


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements, read as integers, as a scalar on the tensor's device.

    Hashing a model takes too long for each lane. The parts of a tensor have sums that add up to its own.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    integers = tensor.contiguous().view(-1).view(_INTEGERS.get(tensor.element_size(), torch.int64))
    if len(integers) <= _PART:
        return integers.sum(dtype=torch.int64)
    return torch.stack([part.sum(dtype=torch.int64) for part in integers.split(_PART)]).sum()
