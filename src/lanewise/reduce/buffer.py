"""One buffer of a module: its value at a start, whether that changed, and the way back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lanewise.errors import TaskError

CHANGED, RESHAPED = 1.0, 2.0
"""What is told of a buffer that changed, and of one that has another shape now; 0 of others."""


class Buffer:
    """One buffer of one module; it survives that a forward replaces or resizes the tensor."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name = name
        self._module = module
        self._key = key
        self.note_start()

    def note_start(self) -> None:
        """Take what the module holds for the start of a step."""
        tensor = self._module._buffers[self._key]
        if tensor is not None and any(
            stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            tensor = tensor.contiguous()  # of an expanded one, no element can be written by itself
        self._tensor = self._module._buffers[self._key] = tensor
        self.start = None if tensor is None else tensor.detach().clone()

    def follow(self, other: "Buffer") -> None:
        """Take the start of the step from the same buffer of another replica."""
        self._tensor = self._module._buffers[self._key]
        device = None if self._tensor is None else self._tensor.device
        self.start = None if other.start is None else other.start.to(device)
        self.reset()

    def reset(self) -> None:
        """Put the start of the step back."""
        if self.start is None:
            self._tensor = None
        elif self._tensor is None or self._tensor.shape != self.start.shape:
            self._tensor = self.start.clone()
        else:
            self._tensor.copy_(self.start)
        self._module._buffers[self._key] = self._tensor

    def look(self) -> tuple[float | torch.Tensor, torch.Tensor | None]:
        """Return whether the buffer is other than at the start of the step, and a copy of it if it may be.

        Does not wait for a GPU: there the answer is a tensor.
        """
        value, start = self._module._buffers[self._key], self.start
        if value is None or start is None or value.shape != start.shape:
            change: float | torch.Tensor = 0.0 if value is start else RESHAPED
        elif value.is_cpu:
            change = 0.0 if torch.equal(value, start) else CHANGED
        else:
            change = (value.detach() != start).any()
        is_unchanged = isinstance(change, float) and not change
        return change, None if value is None or is_unchanged else value.detach().clone()


@contextmanager
def kept_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put all buffers of some modules back afterwards."""
    buffers = list(find_buffers(modules))
    try:
        yield
    finally:
        for buffer in buffers:
            buffer.reset()


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep an evaluation from leaving a mark on training: buffers are put back.

    Raises:
        TaskError: if a parameter was changed meanwhile.
    """
    versions = [(name, one, one._version) for module in modules for name, one in module.named_parameters()]
    with kept_buffers(modules):
        yield
    for name, parameter, version in versions:
        if parameter._version != version:
            raise TaskError(
                f"an evaluation changed parameter {name}, differently on each process. Only the optimizer "
                "may change parameters; keep what a forward maintains in a buffer."
            )


def find_buffers(modules: Sequence[nn.Module]) -> Iterator[Buffer]:
    """Find every buffer of the modules; if there are several modules, names begin with the module's number.

    Sparse buffers are left alone: they have no elements that could be averaged.
    """
    for number, root in enumerate(modules):
        for prefix, module in root.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is None or tensor.layout is torch.strided:
                    name = ".".join(part for part in (prefix, key) if part)
                    yield Buffer(f"{number}:{name}" if len(modules) > 1 else name, module, key)
