"""The table of runs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lanewise.errors import printable
from lanewise.runs.report.status import MOST_SECONDS, RunStatus

_MOST_METRICS = 3


@dataclass(frozen=True)
class Runs:
    """The runs of a folder, the newest one first."""

    folder: Path
    runs: Sequence[RunStatus]

    def table(self) -> Table:
        """Draw a line for each run. Where a terminal is narrow, the columns after the best value are cut."""
        table = Table(box=None, pad_edge=False)
        for name in ("run", "state", "step", "best"):
            table.add_column(name, justify="right" if name == "step" else "left", no_wrap=True)
        for name in ("loss", "started", "evaluation"):
            table.add_column(_cut(name), justify="right" if name == "loss" else "left")
        for run in self.runs:
            started = (
                ""
                if run.started is None
                else datetime.fromtimestamp(run.started, tz=UTC).astimezone().strftime("%m-%d %H:%M")
            )
            values = [f"{name} {value:.4g}" for name, value in run.evaluation.items()][:_MOST_METRICS]
            whole = (
                self._name(run),
                run.state,
                _progress(run),
                "" if run.best is None else f"{run.best[0]} {run.best[2]:.4g}",
            )
            others = (
                "" if run.loss is None else f"{run.loss:.4g}",
                started,
                ", ".join(values),
            )
            table.add_row(*(escape(printable(cell)) for cell in whole), *map(_cut, others))
        return table

    def lines(self) -> Iterator[str]:
        """Say of each run what else there is to know: time left, the best value, errors, how to go on."""
        for run in self.runs:
            facts = list(_facts(run))
            if facts:
                yield printable(f"{self._name(run)}: {'; '.join(facts)}")

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        return {"runs": [{**asdict(run), "run_dir": str(run.run_dir)} for run in self.runs]}

    def _name(self, run: RunStatus) -> str:
        """Return the path of a run as it is seen from the folder."""
        is_inside = run.run_dir.is_relative_to(self.folder) and run.run_dir != self.folder
        path = run.run_dir.relative_to(self.folder) if is_inside else run.run_dir
        return str(path)


def _cut(text: str) -> Text:
    """Return what is shown as far as there is room for it."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _progress(run: RunStatus) -> str:
    if run.step is None:
        return ""
    return f"{run.step:,}" if run.last_step is None else f"{run.step:,}/{run.last_step:,}"


def _facts(run: RunStatus) -> Iterator[str]:
    if run.devices:
        yield f"{run.devices}, {run.reducer}" if run.reducer else run.devices
    if run.seconds is not None and run.state != "running":
        yield f"took {timedelta(seconds=round(min(run.seconds, MOST_SECONDS)))}"
    if run.samples_per_second is not None:
        yield f"{run.samples_per_second:,.1f} samples/s"
    if run.num_starts > 1:
        yield f"started {run.num_starts} times"
    if run.seconds_left is not None:
        yield f"{timedelta(seconds=round(run.seconds_left))} left"
    if run.best is not None:
        name, step, value = run.best
        yield f"best {name} {value:.6g} after step {step:,}"
    if run.error:
        yield run.error
    yield from run.problems
    if run.next_command:
        yield f"resume with: {run.next_command}"
    elif run.state in ("killed", "failed", "preempted"):
        yield "no checkpoint was saved to resume from"
