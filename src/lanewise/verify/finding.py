"""One reason why devices don't compute the same, and how it is worded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A reason why devices don't compute the same."""

    cause: str
    evidence: str
    remedy: str


def first(*candidates: Iterator[Finding]) -> list[Finding]:
    """Return the first finding: those after it are mostly its consequences."""
    for found in candidates:
        for finding in found:
            return [finding]
    return []


def named(names: Sequence[str]) -> str:
    """Say what changed, as the end of a sentence."""
    return f"; what changed besides: {listed(names)}" if names else ""


def listed(names: Sequence[str]) -> str:
    """List a few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_generator(name: str) -> bool:
    """Tell whether a value is the state of a generator, by what `hidden_state` calls it."""
    return name.endswith("(a generator)")


def changing(seen: str, names: Sequence[str]) -> Finding:
    """Name what a result depends on: a generator, if one moved, and otherwise state."""
    generators = [name for name in names if is_generator(name)]
    return drawn(seen, generators) if generators else hidden(seen, names)


def drawn(seen: str, generators: Sequence[str]) -> Finding:
    """Name a generator of one's own."""
    return Finding(
        "random numbers from a generator that lanewise does not seed",
        f"{seen}{named(generators)}.",
        "Draw from the default generators of torch, numpy and random: they are seeded for every lane of "
        "every step.",
    )


def hidden(seen: str, names: Sequence[str]) -> Finding:
    """Name state of model or task."""
    return Finding(
        "state outside of parameters and buffers",
        f"{seen}{named(names)}.",
        "Make it a buffer (register_buffer): buffers start each lane with the same value, are merged over "
        "the lanes, and are in checkpoints.",
    )
