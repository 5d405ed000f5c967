"""What a diagnosis is, and the clauses that the sentences of diagnoses share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lanewise.commands.verify.evidence import Evidence
from lanewise.commands.verify.operators import Divergence

Kind = Literal[
    "samples",
    "initial weights",
    "forward",
    "generators",
    "parameters",
    "options",
    "micro-batch",
    "metrics",
    "close",
    "saved state",
    "unexplained",
    "resumed",
    "configuration",
]
"""What a cause acts on, in the order in which causes are looked for: what differs within one process comes
before what differs between two, and precise causes before general ones."""
Find = Callable[[Evidence], Iterator[str]]
"""Yields sentences that show a cause, of which the first one is used; nothing where the cause is absent."""


@dataclass(frozen=True)
class Diagnosis:
    """A cause for which devices compute different results, how it is found, and what to do about it."""

    kind: Kind
    cause: str
    """A clause."""
    remedy: str
    """A sentence that says what to change."""
    find: Find


def diagnosis(kind: Kind, cause: str, remedy: str) -> Callable[[Find], Diagnosis]:
    """Make the decorated function, which finds the cause, a diagnosis."""
    return lambda find: Diagnosis(kind, cause, remedy, find)


def also_changed(names: Sequence[str]) -> str:
    """Say what else changed, as the end of a sentence."""
    return f"; also changed: {listed(names)}" if names else ""


def first_in(divergence: Divergence | None) -> str:
    """Say where two passes diverge, as the end of a clause."""
    return f", first in {divergence.call}" if divergence else ""


def listed(names: Sequence[str]) -> str:
    """List a few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
