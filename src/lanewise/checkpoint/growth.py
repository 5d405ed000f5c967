"""Buffers that are None or empty in a new module and grow in its first step, as those of observers do."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def grown_buffers(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers of a saved state that have elements there and none in the module."""
    return {name: value for name, value, _, _ in _find(module, saved)}


def grow_buffers(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give a module the buffers that `grown_buffers` returns."""
    device = next((parameter.device for parameter in module.parameters()), None)
    for _, value, owner, key in list(_find(module, saved)):
        owner._buffers[key] = value.detach().to(device, copy=True)


def _find(module: nn.Module, saved: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, nn.Module, str]]:
    for prefix, owner in module.named_modules():
        for key, current in owner._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            value = saved.get(name)
            if isinstance(value, torch.Tensor) and value.numel() and (current is None or not current.numel()):
                yield name, value, owner, key
