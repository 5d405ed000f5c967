"""The report of `lanewise verify`: a table, the causes, and one line with the result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lanewise.commands.printed import Printed
from lanewise.commands.recording.comparison import Recording
from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.evidence import LayoutResult
from lanewise.commands.verify.trace import CHECKS
from lanewise.config import RunConfig


@dataclass(frozen=True, repr=False)
class VerifyReport(Printed):
    """The result of `verify`."""

    config: RunConfig
    layouts: Sequence[LayoutResult]
    """One process, one process again, and the others."""
    findings: Sequence[Finding]
    notes: Sequence[str]

    @property
    def is_verified(self) -> bool:
        """Whether all layouts compute the same, and nothing was found that could make them differ."""
        return not self.findings

    @property
    def steps(self) -> Mapping[int, Recording]:
        """The steps that one process took, by number, from 1."""
        return self.layouts[0].trace.steps

    def heading(self) -> str:
        """Describe what was run."""
        batch = self.config.batch
        full = batch.global_batch_size
        sizes = {step: sum(map(len, recording["samples"].values())) for step, recording in self.steps.items()}
        steps = [str(step) for step in sizes]
        steps += [f"step {step} with {size} of {full} samples" for step, size in sizes.items() if size < full]
        return (
            f"steps {', '.join(steps) or '-'}; {batch.num_lanes} lanes; precision {self.config.precision}; "
            f"reducer {self.config.distributed.reducer_of_several}; compared with one process, byte for byte"
        )

    def table(self) -> Table:
        """Return a row for each layout, which says for each check whether it is the same."""
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        table.add_column("run on")
        for name in CHECKS:
            table.add_column(name, no_wrap=True)
        for layout in self._rows():
            cells = ["differs" if check in layout.differences else "same" for check in CHECKS]
            if not layout.trace.steps:
                cells = ["failed" if layout.failure else "not run"]
            table.add_row(layout.name, *cells)
        return table

    def lines(self) -> Iterator[str]:
        """Yield what the table does not show; the last line is the result."""
        for layout in self._rows():
            for check, difference in layout.differences.items():
                yield f"differs: {check} of {layout.name}, first at {difference}"
        for failure in dict.fromkeys(layout.failure for layout in self._rows() if layout.failure):
            if not any(failure in finding.evidence for finding in self.findings):
                names = [layout.name for layout in self._rows() if layout.failure == failure]
                yield f"failed: {_listed(names)}: {failure}"
        for layout in self.layouts[2:]:
            close = layout.close
            if close is not None and not close.num_elements:
                yield f"equality close, {layout.name}: no gradient could be compared"
            elif close is not None:
                yield (
                    f"equality close, {layout.name}: gradients differ by at most {close.worst:.3g} of their "
                    f"bound; weights after the steps by {close.weights:.1e} (not judged)"
                )
        for note in self.notes:
            yield f"note: {note}"
        for finding in self.findings:
            yield f"found: {finding.cause}\n  {finding.evidence}\n  {finding.remedy}"
        yield f"verified: {self._outcome()}" if self.is_verified else f"not verified: {self._outcome()}"

    def _outcome(self) -> str:
        """Say how the layouts compare, and how many causes were found."""
        listed = _listed([layout.name for layout in self.layouts if layout.name != "1 again"])
        if self.is_verified:
            is_close = self.config.distributed.equality == "close"
            grades = " in exact, and in close the same but for rounding" if is_close else ""
            return f"{listed} compute the same bytes{grades}"
        causes = f"{len(self.findings)} cause{'s' if len(self.findings) > 1 else ''} found"
        if failed := [layout.name for layout in self._rows() if layout.failure]:
            return f"{causes}; {_listed(failed)} failed"
        if not_run := [layout.name for layout in self.layouts if not layout.trace.steps]:
            of = "" if len(not_run) == len(self.layouts) else f" of {_listed(not_run)}"
            return f"{causes}; training would refuse it, so no step{of} was run"
        if any(layout.differences for layout in self.layouts):
            return f"{causes}; {listed} do not compute the same"
        if any(layout.differences for layout in self._rows()):
            return f"{causes}; {listed} agree, a resumed run does not"
        return f"{causes}, though {listed} agree in these steps"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as values of JSON."""
        return {
            "verified": self.is_verified,
            "steps": [*self.steps],
            "num_lanes": self.config.batch.num_lanes,
            "layouts": [_layout_to_json(layout) for layout in self._rows()],
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
        }

    def _rows(self) -> list[LayoutResult]:
        return [*self.layouts[1:], *(layout.resumed for layout in self.layouts if layout.resumed)]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _layout_to_json(layout: LayoutResult) -> dict[str, Any]:
    return {
        "name": layout.name,
        "num_processes": len(layout.results),
        "failure": layout.failure or None,
        "differences": {
            check: {"place": difference.place, "values": [repr(value) for value in difference.values]}
            for check, difference in layout.differences.items()
        },
        "close": asdict(layout.close) if layout.close else None,
    }
