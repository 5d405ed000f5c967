"""Hashes the values of samples and batches."""

import copyreg
import hashlib
import logging
import types
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, final

import numpy as np
import torch

from lanewise.processes.device.tensor_bytes import tensor_bytes

logger = logging.getLogger(__name__)


def digest(*values: Any, tensors: list[torch.Tensor] | None = None) -> str:
    """Return 32 hexadecimal digits, equal for equal values.

    Tensors, arrays, numbers and texts count in any nesting, sets without an order, images by their bytes, and
    other objects by their type and the state that pickle would keep of them: attributes, slots, or a state of
    their own. Their text does not count, since it may hold an address. If the value of an object cannot be
    found out, only its type counts; a warning names each such type once, and `opaque_types` returns them.

    Args:
        values: what to hash.
        tensors: a list that receives the tensors among the values, whose elements are not hashed then.
    """
    hasher = _Hasher(tensors)
    for value in values:
        hasher.feed(value)
    return hasher.hashed.hexdigest()


def opaque_types() -> tuple[str, ...]:
    """Return the types whose objects were hashed by their type alone in this process so far."""
    return tuple(_opaque)


@final
class _Hasher:
    """A growing hash, and the path from the outermost value to the one that it is given."""

    def __init__(self, tensors: list[torch.Tensor] | None) -> None:
        self._tensors = tensors
        self.hashed = hashlib.blake2b(digest_size=16)
        self._above: list[int] = []
        """Identities of the values around this one: an object may hold itself."""
        self._num_objects = 0
        """How many of these are neither containers nor tensors."""

    def feed(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._feed_tensor(value)
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            self.feed([str(value.dtype), value.shape])
            self.hashed.update(value.tobytes())
        elif isinstance(value, str | bytes | int | float | complex | None):
            self.hashed.update(repr(value).encode() + b";")
        elif id(value) in self._above:
            self.hashed.update(b"^%d;" % (len(self._above) - self._above.index(id(value))))
        else:
            self._above.append(id(value))
            self._feed_parts(value)
            self._above.pop()

    def _feed_tensor(self, value: torch.Tensor) -> None:
        if value.is_nested:
            self.feed(list(value.unbind()))
            return
        if self._tensors is not None:
            self.feed([str(value.dtype), tuple(value.shape)])
            self._tensors.append(value)
            return
        if value.layout is not torch.strided:
            value = value.to_dense()
        self.feed([str(value.dtype), tuple(value.shape)])
        try:
            if value._is_zerotensor():  # noqa: SLF001 - which forward-mode differentiation makes; no public name
                value = value.clone()
            self.hashed.update(tensor_bytes(value))
        except (RuntimeError, TypeError) as error:  # as of a meta tensor, which has no values
            _warn(value, f"its elements cannot be read: {error!s:.100}")

    def _feed_parts(self, value: Any) -> None:
        if isinstance(value, np.ndarray | np.generic):
            self.feed(value.tolist())
        elif isinstance(value, Mapping | Sequence):
            self.hashed.update(b"%d:" % len(value))
            for part in chain.from_iterable(value.items()) if isinstance(value, Mapping) else value:
                self.feed(part)
        elif isinstance(value, AbstractSet):  # iterated in another order by each process
            self.hashed.update(b"%s%d:" % (type(value).__qualname__.encode(), len(value)))
            for item_digest in sorted(digest(item) for item in value):
                self.feed(item_digest)
        else:
            self.hashed.update(type(value).__qualname__.encode())
            self._feed_object(value)

    def _feed_object(self, value: Any) -> None:
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            name = f"{value.__module__}.{value.__qualname__}"
            self.feed(name)
            if isinstance(value, types.FunctionType) and "<" in name:  # a lambda, or one within a function
                _warn(value, "a function has no value")
            return
        if callable(to_bytes := getattr(value, "tobytes", None)):
            self.hashed.update(to_bytes())
            return
        if self._num_objects == _MAX_DEPTH:
            _warn(value, f"it lies within {_MAX_DEPTH} other objects")
            return
        try:
            state, others = _pickled(value)
        except Exception as error:  # noqa: BLE001 - whatever the object's own code raises
            _warn(value, f"{error!s:.100}")
            return
        self._num_objects += 1
        self.feed({} if state is None else state)
        if others:
            self.feed(others)
        self._num_objects -= 1


def _pickled(value: Any) -> tuple[Any, list[Any]]:
    """Return the state that pickle would keep of an object, and the other parts from which it would build it.

    Raises:
        TypeError: if pickle refuses it, as it does for objects of C that do not tell their state.
    """
    reduce = copyreg.dispatch_table.get(type(value))
    reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduced, str):  # the name of something global, as torch.float32
        return None, [reduced]
    arguments, state, items, pairs = (*reduced[1:], None, None, None)[:4]
    others = [argument for argument in arguments if argument is not type(value)]
    others += [list(part) for part in (items, pairs) if part is not None]
    return state, others


def _warn(value: Any, why: str) -> None:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _opaque:
        _opaque[name] = None
        logger.warning(
            "%s is compared by its type alone, so that different values count as equal: %s. Give the class "
            "__getstate__, or keep its objects out of samples and of what checkpointed blocks get.",
            name,
            why,
        )


_opaque: dict[str, None] = {}
_MAX_DEPTH = 4
"""How many objects within each other are looked into: each path through them is followed."""
