"""Tells whether two processes see the same dataset, by its length and a few samples."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lanewise.data.reader import LaneReader


class Fingerprint(NamedTuple):
    """Equal for equal datasets; unequal for most others."""

    num_samples: int
    samples_digest: str
    """Hash of the first, the middle and the last sample, as epoch 0 sees them."""


def fingerprint(reader: LaneReader, num_samples: int) -> Fingerprint:
    """Read three samples, each under its own random state, and hash them."""
    digest = hashlib.blake2b(digest_size=16)
    for index in sorted({0, num_samples // 2, num_samples - 1}):
        _feed(digest, reader.read(0, (index,)))
    return Fingerprint(num_samples, digest.hexdigest())


def _feed(digest: "hashlib.blake2b", value: Any) -> None:
    """Hash what a sample holds; of unknown objects only the type, since their text may hold an address."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        _feed(digest, [str(value.dtype), tuple(value.shape)])
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        _feed(digest, [str(value.dtype), value.shape])
        digest.update(value.tobytes())
    elif isinstance(value, str | bytes | int | float | complex | None):
        digest.update(repr(value).encode() + b";")
    elif isinstance(value, Mapping):
        digest.update(b"%d:" % len(value))
        for key, item in value.items():
            _feed(digest, key)
            _feed(digest, item)
    elif isinstance(value, Sequence):
        digest.update(b"%d:" % len(value))
        for item in value:
            _feed(digest, item)
    else:
        digest.update(type(value).__qualname__.encode())
