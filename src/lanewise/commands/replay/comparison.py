"""Compares two recordings of a step: what differs, what first, and what only one of them has."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Recording: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What is known of a step: parts by name, in the order in which it makes them, each with values by name."""


@dataclass(frozen=True)
class RecordingComparison:
    """How two recordings of a step compare."""

    parts: Sequence[str]
    """What both have."""
    num_compared: int
    """How many values these have."""
    differing: Mapping[str, tuple[Any, Any]]
    """The values of each name that differs, in the order of a step; None where one has no such name."""
    missing: Sequence[str]
    """Parts that only one has, so that nothing is known of them."""


def compare(mine: Recording, theirs: Recording) -> RecordingComparison:
    """Compare two recordings of a step, part by part."""
    parts = [part for part in mine if part in theirs]
    unequal = {
        name: (mine[part].get(name), theirs[part].get(name))
        for part in parts
        for name in differing(mine[part], theirs[part])
    }
    count = sum(len({**mine[part], **theirs[part]}) for part in parts)
    missing = [part for part in {**mine, **theirs} if part not in parts]
    return RecordingComparison(parts, count, unequal, missing)


def differing(mine: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the keys of which two mappings have other values, or only one has any; a NaN equals itself."""
    return (key for key in {**mine, **theirs} if repr(mine.get(key)) != repr(theirs.get(key)))
