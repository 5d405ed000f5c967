"""How a device is used, where that depends on its type: the CPU, or the accelerator that torch was built for.

`torch.accelerator` stands for the accelerator, whichever it is: cuda (which is also ROCm's name), xpu, mps or
another. What it lacks is in the module of the device type, such as `torch.mps`. No other module of ours tells
one type of accelerator from another, unless a fact is true of one of them only.
"""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch

from lanewise.processes.device.nested import map_leaves

_WITHOUT_FLOAT64 = {"mps"}
_WITH_XOR = {"cpu", "cuda"}

Moment = float | torch.Event
"""A point in time: in seconds of the host's clock, or between two operations that a device runs."""


def set_current_device(device: torch.device) -> None:
    """Make a device the default one of this thread; nothing is to be done for the CPU."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def device_name(device: torch.device) -> str:
    """Return the model of an accelerator, or its type where torch does not know the model."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def float64_device(device: torch.device) -> torch.device:
    """Return where to compute in float64: on the device, or on the CPU where the device has no float64."""
    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that tensors held on the device so far.

    On a CPU, and where torch does not count it, the most that the process held of the host's.
    """
    module = torch.get_device_module(device)
    if device.type != "cpu" and hasattr(module, "max_memory_allocated"):
        return int(module.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@cache
def built_for() -> ModuleType | None:
    """Return torch's module of the accelerator that it was built for and finds; None where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else torch.get_device_module(accelerator)


def module_in_use() -> ModuleType | None:
    """Return torch's module of the accelerator if this process uses it; asking does not wake the device."""
    module = built_for()
    if module is None:
        return None
    if hasattr(module, "is_initialized"):
        is_used = module.is_initialized()
    else:  # as on mps: torch.manual_seed asks the same before it seeds it
        is_used = module.is_available() and not module._is_in_bad_fork()  # noqa: SLF001
    return module if is_used else None


def generator_state() -> torch.Tensor | None:
    """Return the state of the current accelerator's generator; None if this process uses none."""
    module = module_in_use()
    return None if module is None else module.get_rng_state()


def set_generator_state(state: torch.Tensor) -> None:
    """Put what `generator_state` returned into the generator of the current accelerator."""
    module = module_in_use()
    assert module is not None
    module.set_rng_state(state)


def can_join_by_xor(device: torch.device) -> bool:
    """Tell whether the device has a kernel for `torch.hash_tensor`."""
    return device.type in _WITH_XOR


@cache
def has_streams(device: torch.device) -> bool:
    """Tell whether the device works through streams, and copies from pinned memory while it computes.

    mps does not: its copies are waited for.
    """
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def move(data: Any, device: torch.device) -> Any:
    """Return data, in whichever containers, whose tensors are on a device; gradients flow back."""

    def move_leaf(leaf: Any) -> Any:
        options = {"non_blocking": has_streams(device)} if isinstance(leaf, torch.Tensor) else {}
        return leaf.to(device, **options)

    return map_leaves(move_leaf, data)


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return another stream of the device; None where it has none."""
    return torch.Stream(device) if has_streams(device) else None


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Enqueue on a stream; None changes nothing. Unlike `with stream`, it can be entered inside itself."""
    if stream is None:
        yield
        return
    with torch.accelerator.device_index(stream.device.index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Enqueue a block on a stream of its own, after the work that was enqueued so far."""
    stream = _side_stream(device)
    if stream is not None:
        stream.wait_stream(torch.accelerator.current_stream(device))
    with on_stream(stream):
        yield


def start_copy_to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the CPU; a tensor of the CPU is not copied.

    A step reads values of the device in no other way, so it waits for the device nowhere else.

    Returns:
        A function that waits for the copy, and so for the work that was enqueued before it, and returns it.
    """
    if not has_streams(tensor.device):
        there = tensor.cpu()
        return lambda: there
    with side_stream(tensor.device):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        stream = torch.accelerator.current_stream(tensor.device)
        tensor.record_stream(stream)
        copied = stream.record_event()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return host

    return wait


def moment(device: torch.device) -> Moment:
    """Return the current moment, of the device where it has streams, else of the host, without waiting."""
    if not has_streams(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def has_passed(then: Moment) -> bool:
    """Tell whether a moment is over: whether the device has come to it. Does not wait."""
    return isinstance(then, float) or then.query()


def seconds_between(start: Moment, end: Moment) -> float:
    """Return the time between two moments of one device; waits for the second one."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return start.elapsed_time(end) / 1e3


_side_stream = cache(new_stream)
