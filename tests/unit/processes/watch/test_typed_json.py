"""What another process told has the type that it must have, or is refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Never

import pytest

from lanewise.processes.watch.typed_json import read_typed


@dataclass(frozen=True)
class Place:
    rank: Annotated[int, range(4)]
    places: Sequence[tuple[str, float | None]]


@pytest.mark.parametrize(
    ("written", "hint", "value"),
    [
        (b"1", int, 1),
        (b"1", float, 1),
        (b"1.5", float, 1.5),
        (b"true", bool, True),
        (b"null", NoneType, None),
        (b"null", str | None, None),
        (b'"a"', str | None, "a"),
        (b'"AGI="', bytes, b"\0b"),
        (b"[[1], []]", list[list[int]], [[1], []]),
        (b'["a", null]', tuple[str, int | None], ("a", None)),
        (b'{"rank": 3, "places": [["a", 1.5]]}', Place, Place(3, [("a", 1.5)])),
        (b'[{"a": 1}]', list[Any], [{"a": 1}]),
    ],
)
def test_what_has_the_type_is_returned(written, hint, value):
    assert read_typed(written, hint) == value


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        (b"", int),
        (b"\xff", str),
        (b"true", int),
        (b"1", bool),
        (b"1.0", int),
        (b'"1"', int),
        (b"NaN", float),
        (b"-Infinity", float),
        (b"1" + b"0" * 30, int),
        (b"1" + b"0" * 5000, float),
        (b"null", str),
        (b"null", Never),
        (b'"a b"', bytes),
        (b'"\\u00e4"', bytes),
        (b"[1, null]", list[int]),
        (b'["a"]', tuple[str, int]),
        (b'{"rank": 4, "places": []}', Place),
        (b'{"rank": true, "places": []}', Place),
        (b'{"rank": 1}', Place),
        (b'{"rank": 1, "places": [], "more": 1}', Place),
        (b"[" * 100_000, list[Any]),
    ],
)
def test_anything_else_is_refused(written, hint):
    with pytest.raises(ValueError):  # noqa: PT011 - the reader says what came
        read_typed(written, hint)
