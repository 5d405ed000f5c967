"""The report of `lanewise verify -- PROGRAM`: a table, the causes, and one line with the result."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lanewise.commands.printed import Printed
from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.foreign.compare import Comparison, percent

_NOT_COMPARED = {
    "dropout": "dropout was off, since each process draws its own",
    "batch normalization": "batch normalization used running statistics, as a process has others of its own",
    "half precision": "half precision: what differs by less than 3% may be rounding",
}
"""What is said of a fact that a process noted."""
_ORDER, _EVALUATION = "the order of a second epoch (--until epoch)", "evaluations (--until evaluation)"
_NOT_SEEN = {"updates": f"{_ORDER}, {_EVALUATION}", "epoch": _EVALUATION, "evaluation": _ORDER}
"""What a program was not observed for, by how long it was observed."""


@dataclass(frozen=True)
class LayoutReport:
    """What was found about one number of processes."""

    num_processes: int
    comparisons: Sequence[Comparison]
    findings: Sequence[Finding]
    alone: Sequence[str]
    """What processes that read their own samples do otherwise than one, which may be right."""
    notes: Sequence[str]
    not_compared: str
    """Why gradients could not be compared; empty where they were."""


@dataclass(frozen=True, repr=False)
class ProgramReport(Printed):
    """The result of `lanewise verify -- PROGRAM`."""

    command: Sequence[str]
    num_updates: int
    until: str
    layouts: Sequence[LayoutReport]

    @property
    def is_verified(self) -> bool:
        """Whether all numbers of processes have the gradients of one, and nothing else was found."""
        return not any(layout.findings or layout.not_compared for layout in self.layouts)

    def heading(self) -> str:
        """Describe what was run."""
        return (
            f"{shlex.join(self.command)}: the first {self.num_updates} updates, compared with one process "
            "that reads the same samples"
        )

    def table(self) -> Table:
        """Return a row for each update of each number of processes."""
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        for name in ("run on", "update", "gradient", "remainder", "result"):
            table.add_column(name, no_wrap=True)
        for layout in self.layouts:
            name = f"{layout.num_processes} processes"
            for held in layout.comparisons:
                same = "same" if held.is_right and held.is_reduced else "differs"
                factor = f"{held.factor:.4f} times the expected one"
                table.add_row(name, str(held.number + 1), factor, percent(held.residual), same)
            if not layout.comparisons:
                table.add_row(name, "-", "-", "-", "not compared")
        return table

    def lines(self) -> Iterator[str]:
        """Yield what the table does not show; the last line is the result."""
        for layout in self.layouts:
            name = f"{layout.num_processes} processes"
            if layout.not_compared:
                yield f"not compared, {name}: {layout.not_compared}"
            yield from (
                f"note, {name}, each with the samples that it reads itself: {line}" for line in layout.alone
            )
        facts = {fact for layout in self.layouts for fact in layout.notes}
        yield from (f"note: {text}" for fact, text in _NOT_COMPARED.items() if fact in facts)
        findings = dict.fromkeys(finding for layout in self.layouts for finding in layout.findings)
        for finding in findings:
            yield f"found: {finding.cause}\n  {finding.evidence}\n  {finding.remedy}"
        if self.is_verified:
            yield f"verified: the gradients are those of one process; not looked at: {_NOT_SEEN[self.until]}"
        elif findings:
            yield f"not verified: {len(findings)} cause{'s' if len(findings) > 1 else ''} found"
        else:
            yield "not verified: the gradients could not be compared"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as values of JSON."""
        return {
            "verified": self.is_verified,
            "command": list(self.command),
            "layouts": [asdict(layout) for layout in self.layouts],
        }
