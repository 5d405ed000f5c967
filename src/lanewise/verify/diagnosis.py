"""What a diagnosis is, what a finding is, and how both name things in a sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lanewise.verify.evidence import Evidence
from lanewise.verify.operators import Divergence

Kind = Literal[
    "samples",
    "initial weights",
    "forward",
    "parameters",
    "options",
    "micro-batch",
    "metrics",
    "close",
    "saved state",
    "configuration",
    "unexplained",
]
"""What a cause acts on. Only the first one of a kind is named: later ones are mostly its consequences."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A cause for which devices compute different results, how it is found, and what to do about it."""

    kind: Kind
    """`unexplained` ones are looked for only where no diagnosis before them was found."""
    cause: str
    find: Callable[[Evidence], str | None]
    """Returns what shows the cause, as a sentence; None where nothing does."""
    remedy: str


@dataclass(frozen=True)
class Finding:
    """A reason why devices don't compute the same."""

    cause: str
    evidence: str
    remedy: str


def also_changed(names: Sequence[str]) -> str:
    """Say what else changed, as the end of a sentence."""
    return f"; also changed: {listed(names)}" if names else ""


def first_in(divergence: Divergence | None) -> str:
    """Say where two passes diverge, as the end of a clause."""
    return f", first in {divergence.call}" if divergence else ""


def listed(names: Sequence[str]) -> str:
    """List a few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
