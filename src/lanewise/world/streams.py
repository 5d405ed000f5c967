"""Copies between the CPU and a GPU that the host need not wait for; on the CPU nothing is copied."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Enqueue on a stream of its own what needs the work enqueued so far, but not what will follow."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def start_copy_to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the CPU.

    Returns:
        A function that waits for the copy, and so for the work that was enqueued before it, and returns it.
    """
    if tensor.device.type != "cuda":
        return lambda: tensor
    with side_stream(tensor.device):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        stream = torch.cuda.current_stream(tensor.device)
        tensor.record_stream(stream)
        copied = stream.record_event()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return host

    return wait


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
