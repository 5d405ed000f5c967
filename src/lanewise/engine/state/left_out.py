"""Buffers that a state dict leaves out, as those registered with `persistent=False`.

Most of them are tables that a new module has too, so only those are saved that are no longer what they were
in the new module.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from lanewise.data import digest

Buffers = dict[str, torch.Tensor | None]
"""Buffers by their names; None for a buffer that is None."""


def digests_left_out(module: nn.Module) -> dict[str, str]:
    """Return a digest of each buffer that the state dict of a new module leaves out."""
    return {name: digest(value) for name, (_, _, value) in _left_out(module)}


def changed_left_out(module: nn.Module, start: Mapping[str, str]) -> Buffers:
    """Return those of these buffers that differ from what `digests_left_out` returned of the new module."""
    return {
        name: value
        for name, (_, _, value) in _left_out(module)
        if name in start and digest(value) != start[name]
    }


def left_out_mismatches(module: nn.Module, saved: object, what: str) -> Iterator[str]:
    """Yield why a module cannot take buffers that `changed_left_out` returned."""
    if not isinstance(saved, Mapping):
        yield f"the buffers that the state of {what} leaves out are a {type(saved)} in it"
        return
    names = dict(_left_out(module)).keys()
    for name, value in saved.items():
        if name not in names:
            yield f"{what} {name} is in it, and is no buffer that the state of {what} leaves out in this run"
        elif not isinstance(value, torch.Tensor | None):
            yield f"{what} {name} is a {type(value)} in it"


def restore_left_out(module: nn.Module, saved: Mapping[str, torch.Tensor | None]) -> None:
    """Give a module the values of `changed_left_out`; a tensor of another size replaces the module's own."""
    device = next((parameter.device for parameter in module.parameters()), None)
    for name, (owner, key, current) in list(_left_out(module)):
        if name not in saved:
            continue
        value = saved[name]
        if current is None or value is None or (current.shape, current.dtype) != (value.shape, value.dtype):
            place = device if current is None else current.device
            owner._buffers[key] = None if value is None else value.to(place, copy=True)
        else:
            with torch.no_grad():
                current.copy_(value)


def _left_out(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, torch.Tensor | None]]]:
    saved = module.state_dict().keys()
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, value in owner._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if name not in saved:
                yield name, (owner, key, value)
