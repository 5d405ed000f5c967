"""All that the layouts found, what a diagnosis makes of it, and the clauses that its sentences share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lanewise.commands.recording.comparison import Parting, compare
from lanewise.commands.verify.bound import CloseResult
from lanewise.commands.verify.hidden import changed
from lanewise.commands.verify.job import RankResult
from lanewise.commands.verify.operators import Divergence
from lanewise.commands.verify.probe import Passes, Probe
from lanewise.commands.verify.trace import BUFFER, CHECKS, Trace

Probes = Iterator[tuple[str, Probe]]
"""What some processes found, each with a phrase that names the process in a sentence."""


@dataclass
class LayoutResult:
    """What the processes of one layout found."""

    name: str
    """Its name in tables and sentences, such as `2 processes`."""
    results: Sequence[RankResult] = ()
    """The result of each rank; empty where the processes failed."""
    failure: str = ""
    """Why the processes failed, or why the steps could not be run."""
    differences: dict[str, Parting] = field(default_factory=dict)
    """The first difference of each check that has one, the earliest first, compared with the first layout."""
    hidden_differences: Sequence[str] = ()
    """Values outside of parameters and buffers that differ from those of the first layout at the end."""
    not_restored: Sequence[str] = ()
    """Buffers and such values that the checkpoint, from which the run went on, did not bring back."""
    resumed: "LayoutResult | None" = None
    """What the same processes found when they went on from the checkpoint of another layout."""

    @property
    def trace(self) -> Trace:
        """What rank 0 saw of the steps; it has none where they were not run."""
        return self.results[0].trace if self.results else Trace()

    @property
    def close(self) -> CloseResult | None:
        """How far the gradients of `close` are from those of one process; None where it was not run."""
        return self.results[0].close if self.results else None

    def compare_with(self, reference: "LayoutResult") -> None:
        """Note the differences."""
        mine, theirs = reference.trace.steps, self.trace.steps
        if mine and theirs:
            # A trace that begins later is compared from there on; of a step that only one has all differs.
            steps = [step for step in {**mine, **theirs} if step >= min(theirs)]
            a, b = (
                {step: {part: of.get(step, {}).get(part, {}) for part in CHECKS} for step in steps}
                for of in (mine, theirs)
            )
            self.differences = compare(a, b).differing
            self.hidden_differences = changed(reference.trace.hidden, self.trace.hidden)
            restored = self.trace.at_checkpoint
            names = [
                name for name, state in reference.trace.at_checkpoint.items() if restored.get(name) != state
            ]
            # What is the same at the end, as a memo that is filled again, hardly matters.
            lasting = {name for name in names if name.startswith(BUFFER)} | {*self.hidden_differences}
            self.not_restored = [name for name in names if name in lasting] or names

    def probes(self) -> Probes:
        """Yield what the probes of every rank found."""
        alone = "a second run of 1 process" if self.name == "1 again" else self.name
        for rank, result in enumerate(self.results):
            if result.probe is not None:
                yield alone if len(self.results) == 1 else f"rank {rank} of {self.name}", result.probe


@dataclass(frozen=True)
class Evidence:
    """What the probes and the traces of all layouts noted."""

    layouts: Sequence[LayoutResult]
    """One process, one process again, and the others. If the first one fails, so does verify."""
    left_out: Sequence[str] = ()
    """Settings that were not run, since results depend on the layout through them, as `key value`."""

    @property
    def reference(self) -> RankResult:
        """What the process found that all others are compared with."""
        return self.layouts[0].results[0]

    @property
    def base(self) -> Probe:
        """What the probes of that process found."""
        assert self.reference.probe is not None
        return self.reference.probe

    def probes(self) -> Probes:
        """Yield what every process found."""
        return (found for layout in self.layouts for found in layout.probes())

    def again(self) -> Probes:
        """Yield what the same process found when it was started again."""
        return self.layouts[1].probes()

    def elsewhere(self) -> Probes:
        """Yield what each process of several found."""
        return (found for layout in self.layouts[2:] for found in layout.probes())

    def unequal_passes(self) -> Iterator[tuple[str, Passes]]:
        """Yield passes that differ in one process, each with the beginning of a sentence that says so."""
        for process, probe in self.probes():
            if probe.passes.are_unequal:
                seen = f"the same micro-batch, twice in {process}, gives a different loss or gradient"
                yield seen, probe.passes

    def other_results(self, probes: Probes) -> Probes:
        """Yield the processes that computed another result from equal weights and an equal micro-batch."""
        base = self.base
        for process, probe in probes:
            is_given_the_same = (probe.weights, probe.reads.batch) == (base.weights, base.reads.batch)
            if is_given_the_same and probe.passes.results[0] != base.passes.results[0]:
                yield process, probe

    def resumed(self) -> Iterator[LayoutResult]:
        """Yield the runs that went on from a checkpoint of another layout."""
        return (layout.resumed for layout in self.layouts if layout.resumed)


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


def listed(names: Sequence[object]) -> str:
    """List a few names."""
    return ", ".join(map(str, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
