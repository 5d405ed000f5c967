"""What is known of a step, and how two recordings compare: what differs first, and what only one has."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Recording: TypeAlias = Mapping[str, Mapping[Any, Any]]
"""What is known of a step: parts by name, in the order in which it makes them, values by name or lane."""


@dataclass
class Parting:
    """How far two recordings are equal in one of the parts that both have."""

    num_compared: int = 0
    """How many values, of all steps."""
    last_equal: int = 0
    """The last step before the first unequal one, from 1; 0 where there is none."""
    first_unequal: int | None = None
    unequal: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    """Both values of each name that differs there; None where one has no such name."""

    @property
    def names(self) -> list[str]:
        """What is unequal there: lanes, tensors or columns."""
        return [f"lane {name}" if isinstance(name, int) else str(name) for name in self.unequal]

    @property
    def place(self) -> str:
        """The first one, such as `step 2, lane 1` or `step 1, head.weight`."""
        return f"step {self.first_unequal}, {self.names[0]}"

    @property
    def values(self) -> tuple[Any, Any]:
        """Both values of the first one."""
        return next(iter(self.unequal.values()))

    def __str__(self) -> str:
        more = f" (and {len(self.unequal) - 1} more)" if len(self.unequal) > 1 else ""
        return f"{self.place}{more}"

    def add(self, step: int, mine: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> None:
        """Compare what both have of a step."""
        self.num_compared += len({**mine, **theirs})
        if self.first_unequal is None:
            self.unequal = {name: (mine.get(name), theirs.get(name)) for name in differing(mine, theirs)}
            if self.unequal:
                self.first_unequal = step
            else:
                self.last_equal = step


@dataclass(frozen=True)
class RecordingComparison:
    """How two recordings compare."""

    parts: Mapping[str, Parting]
    """Those that both have of the same step."""
    missing: Mapping[str, int]
    """What only one of them has, and in how many steps, so that nothing is known of it."""

    @property
    def num_compared(self) -> int:
        """How many values were compared."""
        return sum(one.num_compared for one in self.parts.values())

    @property
    def differing(self) -> dict[str, Parting]:
        """The parts that differ, the earliest one first."""
        found = [(one.first_unequal, name) for name, one in self.parts.items() if one.first_unequal]
        return {name: self.parts[name] for _, name in sorted(found, key=lambda place: place[0])}

    @property
    def not_compared(self) -> list[str]:
        """A line that names what only one of them has; empty where there is nothing."""
        names = [f"{name} ({count:,} steps)" if count > 1 else name for name, count in self.missing.items()]
        return [f"not compared, as only one has it: {', '.join(names)}"] if names else []


def compare(
    mine: Mapping[int, Recording], theirs: Mapping[int, Recording], partial: Collection[str] = ()
) -> RecordingComparison:
    """Compare two recordings, step by step and part by part.

    Args:
        mine: by the numbers of the steps, from 1.
        theirs: likewise.
        partial: parts of which either may have more names: what only one has is missing there. Elsewhere it
            differs.
    """
    parts, missing = defaultdict[str, Parting](Parting), Counter[str]()
    for step in sorted({*mine, *theirs}):
        a, b = mine.get(step, {}), theirs.get(step, {})
        missing.update(_of_one(a, b))
        for part in [part for part in a if part in b]:
            of_one = _of_one(a[part], b[part]) if part in partial else []
            missing.update(of_one)
            one, other = ({name: of[part][name] for name in of[part] if name not in of_one} for of in (a, b))
            if one or other:
                parts[part].add(step, one, other)
    return RecordingComparison(dict(parts), dict(missing))


def differing(mine: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the keys of which two mappings have other values, or only one has any; a NaN equals itself."""
    return (key for key in {**mine, **theirs} if repr(mine.get(key)) != repr(theirs.get(key)))


def _of_one(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names that only one of two mappings has."""
    return [name for name in {**mine, **theirs} if name not in mine or name not in theirs]
