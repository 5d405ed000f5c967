"""Each key of a section is described by its type, its default and the text below it."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import pytest

from lanewise.config.check import Section, at_least, below
from lanewise.config.describe import Key, describe_section


class Inner(Section):
    depth: int
    """How deep."""


class Outer(Section):
    count: Annotated[int, at_least(1), below(9)] = 1
    """How many
    there are."""
    rate: float = 1.0
    """How fast."""
    is_on: bool = True
    """Whether it is."""
    mode: Literal["max", "min"] | None = None
    """Which."""
    devices: Annotated[int, at_least(1)] | tuple[str, ...] = ()
    """Where."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What else."""
    inner: Inner
    """What is inside."""
    several: tuple[Inner, ...] = ()
    """Several of them."""
    other: Inner = field(default_factory=lambda: Inner(depth=1))
    """Another."""


@pytest.mark.parametrize(
    "key",
    [
        Key("count", "whole number, at least 1, less than 9", "`1`", "How many there are.", None, False),
        Key("rate", "number", "`1.0`", "How fast.", None, False),
        Key("is_on", "true or false", "`true`", "Whether it is.", None, False),
        Key("mode", "`max`, `min`", "unset", "Which.", None, False),
        Key("devices", "whole number, at least 1 or list of text", "none", "Where.", None, False),
        Key("arguments", "mapping", "none", "What else.", None, False),
        Key("inner", "section", "required", "What is inside.", Inner, False),
        Key("several", "list of section", "none", "Several of them.", Inner, True),
        Key("other", "section", "its defaults", "Another.", Inner, False),
    ],
    ids=lambda key: key.name,
)
def test_a_key(key):
    assert key in describe_section(Outer)
