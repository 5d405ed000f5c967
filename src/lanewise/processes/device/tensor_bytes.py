"""The bytes of a tensor's elements, as they are hashed, written and added up."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from lanewise.processes.device.accelerator import can_join_by_xor, has_streams, start_copy_to_host

_PART = 2**18
"""How many elements are added up at once: `sum` copies them as int64."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio, as an int64: its multiples spread over all bits."""
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
def placed_checksum(tensor: torch.Tensor, num_before: int = 0) -> torch.Tensor:
    """Return the elements as integers, each times an odd number that tells its place, joined by xor.

    So elements that changed places are seen too, and parts of a tensor have checksums whose xor is its own.
    The products have 64 bits, and elements of eight bytes count as two of four: the highest bit of a product
    in the width of its factor is that of the factor, so that a negated tensor would not be seen.

    Args:
        tensor: a tensor, or a part of one.
        num_before: how many elements of the whole tensor are before this part.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor if can_join_by_xor(tensor.device) else tensor.cpu()
    integers = tensor.contiguous().view(-1).view(_INTEGERS.get(tensor.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not len(integers):
        return total
    size = min(2**22 if has_streams(tensor.device) else 2**15, len(integers))  # what a cache holds
    first = 2 * num_before * (len(integers) // tensor.numel()) + 1
    factors = torch.arange(first, first + 2 * size, 2, device=tensor.device).mul_(_ODD)
    for number, part in enumerate(integers.split(size)):
        if number:
            factors += (2 * size * _ODD + 2**63) % 2**64 - 2**63
        products = part.to(torch.int64).mul_(factors[: len(part)])
        total ^= torch.hash_tensor(products).view(torch.int64)
    return total


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


def checksums(tensors: Iterable[Any], of: Callable[[Any], torch.Tensor] = checksum) -> list[int]:
    """Return the sum of each, waiting once for the device.

    Args:
        tensors: on any devices; or what else `of` takes.
        of: `checksum`, or `placed_checksum`.
    """
    sums = [of(tensor) for tensor in tensors]
    if not sums:
        return []
    on_host = start_copy_to_host(torch.stack([total.to(sums[0].device) for total in sums]))()
    return list(map(int, on_host.tolist()))
