"""Tensors in nested containers, such as a collated batch or the outputs of a model."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function in nested containers to the tensors, and to whatever else has a `.to(device)`."""
    if isinstance(data, torch.Tensor) or callable(getattr(data, "to", None)):
        return function(data)
    if isinstance(data, Mapping):
        mapped = {key: map_leaves(function, value) for key, value in data.items()}
        if isinstance(data, dict):
            return copy.copy(data) | mapped  # keeps what a subclass has besides, as a defaultdict its factory
        return type(data)(mapped)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_leaves(function, value) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_leaves(function, value) for value in data)
    return data


def copied(data: Any) -> Any:
    """Return a copy of nested containers and their tensors, for code that may change them."""

    def copy_leaf(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf)

    return map_leaves(copy_leaf, data)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(tensors_in, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(tensors_in, value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from chain.from_iterable(tensors_in(getattr(value, field.name)) for field in fields(value))
