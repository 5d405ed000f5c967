"""The bytes of a tensor's elements, as they are hashed and written."""

import numpy as np
import torch


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
