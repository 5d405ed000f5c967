"""Hashes what samples and batches hold."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def digest(*values: Any) -> str:
    """Return 32 hexadecimal digits, equal for equal values.

    Tensors, arrays, numbers and texts count in any nesting, images by their bytes, and other objects by their
    type and attributes; never by their text, which may hold an address.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for value in values:
        _feed(hashed, value)
    return hashed.hexdigest()


def _feed(hashed: "hashlib.blake2b", value: Any, depth: int = 0) -> None:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided and not value.is_nested:
        value = value.to_dense()
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        _feed(hashed, [str(value.dtype), tuple(value.shape)])
        hashed.update(value.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        _feed(hashed, [str(value.dtype), value.shape])
        hashed.update(value.tobytes())
    elif isinstance(value, np.ndarray):
        _feed(hashed, value.tolist(), depth)
    elif isinstance(value, str | bytes | int | float | complex | None):
        hashed.update(repr(value).encode() + b";")
    elif isinstance(value, Mapping):
        hashed.update(b"%d:" % len(value))
        for key, item in value.items():
            _feed(hashed, key)
            _feed(hashed, item, depth)
    elif isinstance(value, Sequence):
        hashed.update(b"%d:" % len(value))
        for item in value:
            _feed(hashed, item, depth)
    else:
        hashed.update(type(value).__qualname__.encode())
        if callable(to_bytes := getattr(value, "tobytes", None)):
            hashed.update(to_bytes())
        elif depth < _MAX_DEPTH and not callable(value):
            _feed(hashed, getattr(value, "__dict__", {}), depth + 1)


_MAX_DEPTH = 4
"""How many objects within objects are looked into: they may refer to each other in a circle."""
