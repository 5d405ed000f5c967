"""Tensors in nested containers, such as a collated batch or the outputs of a model."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch


def is_movable(data: Any) -> bool:
    """Tell whether something is a tensor, or has a `.to(device)` as tensors do."""
    return isinstance(data, torch.Tensor) or callable(getattr(data, "to", None))


def map_leaves(function: Callable[[Any], Any], data: Any, is_leaf: Callable[[Any], bool] = is_movable) -> Any:
    """Apply a function in nested containers to the leaves: the tensors, and what else can be moved."""
    if is_leaf(data):
        return function(data)
    if isinstance(data, Mapping):
        mapped = {key: map_leaves(function, value, is_leaf) for key, value in data.items()}
        if isinstance(data, dict):
            return copy.copy(data) | mapped  # keeps what a subclass has besides, as a defaultdict its factory
        return type(data)(mapped)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_leaves(function, value, is_leaf) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_leaves(function, value, is_leaf) for value in data)
    if is_dataclass(data) and not isinstance(data, type):
        made = copy.copy(data)
        for field in fields(data):  # also of a frozen one
            object.__setattr__(made, field.name, map_leaves(function, getattr(data, field.name), is_leaf))
        return made
    return data


def copied(data: Any) -> Any:
    """Return a copy of nested containers and their tensors, for code that may change them.

    Tensors keep their strides: a matrix that is a slice may be multiplied by another kernel than one that is
    contiguous, which rounds otherwise.
    """

    def copy_leaf(leaf: Any) -> Any:
        return _cloned(leaf.detach()) if isinstance(leaf, torch.Tensor) else copy.copy(leaf)

    return map_leaves(copy_leaf, data)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return tensor.clone()
    once = tensor  # of what is expanded
    for dimension, stride in enumerate(tensor.stride()):
        once = once if stride else once.narrow(dimension, 0, 1)
    try:
        made = once.new_empty_strided(once.size(), once.stride()).copy_(once)
    except RuntimeError:  # windows that overlap
        return tensor.clone()
    return made.expand(tensor.size())


def plain(data: Any) -> Any:
    """Return what is in nested containers and dataclasses in dicts, lists and tuples."""
    if isinstance(data, tuple):
        return tuple(map(plain, data))
    if isinstance(data, list):
        return list(map(plain, data))
    items = _items(data)
    return data if items is None else {key: plain(value) for key, value in items}


def structure(data: Any) -> str:
    """Describe nested containers and dataclasses: their types, and everything in them but the tensors."""
    if isinstance(data, torch.Tensor):
        return "tensor"
    items = enumerate(data) if isinstance(data, list | tuple) else _items(data)
    if items is None:
        return repr(data)
    inner = ", ".join(f"{key!r}: {structure(value)}" for key, value in items)
    return f"{type(data).__module__}.{type(data).__qualname__}({inner})"


def _items(data: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a mapping or a dataclass; None for anything else."""
    if isinstance(data, Mapping):
        return data.items()
    if is_dataclass(data) and not isinstance(data, type):
        return [(field.name, getattr(data, field.name)) for field in fields(data)]
    return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(tensors_in, value))
    elif items := _items(value):
        yield from chain.from_iterable(tensors_in(inner) for _, inner in items)
