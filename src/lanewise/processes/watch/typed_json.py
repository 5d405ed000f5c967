"""Reads what another process told, as JSON: it has the type that it must have, or it is refused."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from lanewise.errors import plain_lines

_BITS = 63
"""The most bits of a number: nothing that is told needs more, and other code fails with more."""


def read_typed(written: bytes, hint: Any) -> Any:
    """Return what another process told, with the type of a hint.

    Raises:
        ValueError: it is something else, or no JSON.
    """
    try:
        return as_type(json.loads(written), hint)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_type(value: Any, hint: Any) -> Any:
    """Return a value of JSON with the type of a hint: a dataclass of an object, bytes of text in base64.

    `Annotated[int, range(3)]` is a number that is in the range. A truth value is no number. Whatever is in a
    mapping has its type. A text is as `plain_lines` has it.

    Raises:
        ValueError: it has another type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        read = as_type(value, arguments[0])
        if any(read not in allowed for allowed in arguments[1:]):
            raise ValueError(f"it is no {hint}")
        return read
    if origin in (Union, UnionType):
        for option in arguments:
            with suppress(ValueError):
                return as_type(value, option)
    if origin in (list, Sequence) and isinstance(value, list):
        return [as_type(item, arguments[0]) for item in value]
    if origin is tuple and isinstance(value, list | tuple):
        hints_of = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(value) == len(hints_of):
            return tuple(map(as_type, value, hints_of))
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        hints = _fields(hint)
        if value.keys() == hints.keys():
            return hint(**{name: as_type(value[name], of_field) for name, of_field in hints.items()})
    if hint is bytes and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if not _is_plain(value, hint):
        raise ValueError(f"it is no {hint}")
    return plain_lines(value) if hint is str else value


def _is_plain(value: Any, hint: Any) -> bool:
    if hint is Any or (isinstance(value, dict) and get_origin(hint) is Mapping):
        return True
    if type(value) is int:
        return hint in (int, float) and value.bit_length() <= _BITS
    if type(value) is float:
        return hint is float and math.isfinite(value)
    return type(value) is hint and hint in (bool, str, NoneType)


@cache
def _fields(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)
