"""The tables of a measurement, and what they mean."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table

from lanewise.commands.bench.job import LEAST_ROUNDS, NUM_FIRST_STEPS
from lanewise.commands.bench.machine import describe_machine, describe_versions, describe_work
from lanewise.commands.bench.modes import Mode, left_out
from lanewise.commands.bench.rounds import rate
from lanewise.commands.bench.row import STEADY, BenchRow
from lanewise.config import ALONE, Equality, RunConfig
from lanewise.engine.step.phases import PHASES

_NOISY = "*"
_COLUMNS = 5
"""So many of an evaluation's values fit beside each other."""
_Columns: TypeAlias = Mapping[str, Callable[[BenchRow], str]]
"""Says for each column, by its name, what it shows of a row."""


@dataclass
class BenchReport:
    """What was measured."""

    config: RunConfig
    rows: Mapping[Mode, BenchRow]
    why_no_plan: str = ""
    """Why nothing is said of memory and operations beside what was measured; empty where it is."""
    is_interrupted: bool = False
    """Whether the user ended it before the rows were steady."""

    @property
    def best(self) -> BenchRow | None:
        """The fastest row of those with most devices, in the grade of the configuration."""
        return max(self.measured, key=lambda row: (row.mode.num_devices, _median(row)), default=None)

    def speed_up(self, row: BenchRow) -> float | None:
        """Return how many times as fast as one device of the same grade a row is; None where not known."""
        alone = self.rows.get(Mode(ALONE, 1, row.mode.equality))
        return _median(row) / _median(alone) if alone and alone.rounds and row.rounds else None

    def table(self) -> RenderableType:
        """Draw the speeds, the parts of a step, the memory and the evaluations, each in 80 columns."""
        grade = self.config.distributed.equality
        tables = [
            ("samples/s, +- half the width of the middle half of the rounds", self._speeds()),
            (f"parts of a step, in {grade}", self._phases()),
            (f"MiB of tensors on the first and on the fullest device, in {grade}", self._resources()),
            *self._trainings(),
        ]
        parts = [("", title, table) for title, table in tables if table.row_count]
        return Group(*[part for of_table in parts for part in of_table][1:])

    def lines(self) -> Iterator[str]:
        """Say what failed, what is noisy, whether the models are equal, and what bounds the fastest row."""
        failures = [(row, row.failure or row.training_failure) for row in self.rows.values()]
        for failure in dict.fromkeys(failure for _, failure in failures if failure):
            modes = (str(row.mode) for row, of_row in failures if of_row == failure)
            yield f"{'; '.join(modes)}: {failure}"
        if num_noisy := sum(bool(row.rounds) and not row.is_steady for row in self.rows.values()):
            yield (
                f"{_NOISY} {num_noisy} of {len(self.rows)} rows are noisy: they had less than {LEAST_ROUNDS} "
                f"rounds, or the middle half of them is wider than +-{STEADY / 2:.1%}. Give --seconds more"
            )
        if self.is_interrupted:
            yield "interrupted: this is what was measured until then"
        yield from self._notes()
        if (best := self.best) is not None:
            yield f"what bounds {best.mode}: {best.bound()}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        best = self.best
        return {
            "date": datetime.now(tz=UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "work": describe_work(self.config),
            "rows": [{**row.to_json(), "speed_up": self.speed_up(row)} for row in self.rows.values()],
            "bound": None if best is None else f"{best.mode}: {best.bound()}",
        }

    @property
    def measured(self) -> list[BenchRow]:
        """The rows of that grade that train one model and were measured."""
        return [row for row in self._of_grade if row.rounds and not row.mode.is_ceiling]

    @property
    def _of_grade(self) -> list[BenchRow]:
        """The rows of the grade of the configuration."""
        equality = self.config.distributed.equality
        return [row for row in self.rows.values() if row.mode.equality == equality]

    def _notes(self) -> Iterator[str]:
        exact = [row for row in self.rows.values() if row.mode.equality == "exact"]
        models = {row.model for row in exact if row.model}
        if max(len(models), len({row.trained.model for row in exact if row.trained})) > 1:
            yield "the models of exact differ, and must not: `lanewise verify` says why"
        elif models and any(row.rounds for row in self.rows.values()):
            yield f"model: the digest after {NUM_FIRST_STEPS} steps in exact, equal in all rows"
        if self.why_no_plan:
            yield f"plan says nothing: {self.why_no_plan}"
        if removed := {key for mode in self.rows for key in left_out(mode, self.config.distributed)}:
            keys = ", ".join(f"distributed.{key}" for key in sorted(removed))
            yield f"{keys}: left out where the mode cannot have it"

    def _speeds(self) -> Table:
        """Draw a row of both grades for each mode."""

        def in_grade(row: BenchRow, grade: Equality) -> BenchRow | None:
            return self.rows.get(row.mode._replace(equality=grade))

        columns: _Columns = {
            "exact": lambda row: _speed(in_grade(row, "exact")),
            "close": lambda row: _speed(in_grade(row, "close")),
            "speed-up": lambda row: f"{speed_up:.2f}" if (speed_up := self.speed_up(row)) else "",
            "model": lambda row: exact.model if (exact := in_grade(row, "exact")) else "",
        }
        is_begun = any(row.rounds or row.failure for row in self.rows.values())
        return _draw(self._of_grade if is_begun else (), columns)

    def _phases(self) -> Table:
        """Draw where the time of a step goes."""

        def share(name: str, row: BenchRow) -> str:
            return f"{row.shares[name]:.0%}"

        return _draw(self.measured, {name: partial(share, name) for name in PHASES})

    def _resources(self) -> Table:
        """Draw memory, operations and units; what no row has gets no column."""
        columns: _Columns = {
            "first": lambda row: _mib(row.first_bytes),
            "fullest": lambda row: _mib(row.fullest_bytes),
            "plan": lambda row: _mib(row.planned_bytes),
            "TFLOP/s": lambda row: (
                "" if row.flops_per_second is None else f"{row.flops_per_second / 1e12:.3g}"
            ),
            "MFU": lambda row: "" if row.utilization is None else f"{row.utilization:.1%}",
            "units/s": lambda row: "" if row.units_per_second is None else rate(row.units_per_second.median),
        }
        shown = {name: cell for name, cell in columns.items() if any(map(cell, self.measured))}
        return _draw(self.measured, shown)

    def _trainings(self) -> Iterator[tuple[str, Table]]:
        """Draw what some steps and an evaluation came to, with as many values in a table as fit."""
        trained = {row: row.trained for row in self.measured if row.trained is not None}
        num_steps = max((of_row.num_steps for of_row in trained.values()), default=0)
        title = f"after {num_steps:,} steps and an evaluation, in {self.config.distributed.equality}"
        columns: dict[str, Callable[[BenchRow], str]] = {
            "seconds": lambda row: f"{trained[row].seconds:,.1f}",
            "model": lambda row: trained[row].model[:8],
        }

        def value(name: str, row: BenchRow) -> str:
            return f"{trained[row].values[name]:.5g}"

        for name in next(iter(trained.values())).values if trained else ():
            columns[name.replace("/", "/\n")] = partial(value, name)
        names = list(columns)
        for start in range(0, len(names), _COLUMNS):
            shown = names[start : start + _COLUMNS]
            yield title, _draw(list(trained), {name: columns[name] for name in shown})
            title = "further values of that evaluation"


def _median(row: BenchRow) -> float:
    speed = row.samples_per_second
    return 0.0 if speed is None else speed.median


def _draw(rows: Sequence[BenchRow], columns: _Columns) -> Table:
    """Draw a table of modes: the reducer and the devices of each, and these columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("reducer", no_wrap=True)
    for name in ("devices", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = (cell(row) for cell in columns.values())
        table.add_row(row.mode.name, f"{row.mode.num_devices:,}", *cells)
    return table


def _speed(row: BenchRow | None) -> str:
    """Write samples per second, with their spread if it is known, and with a mark where they are noisy."""
    if row is None:
        return ""
    if (speed := row.samples_per_second) is None:
        return "failed" if row.failure else ""
    half = speed.width / 2
    spread = f" +-{half:{'.1%' if half < 0.1 else '.0%'}}" if row.has_spread else ""
    return f"{rate(speed.median)}{spread}{'' if row.is_steady else _NOISY}"


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else rate(num_bytes / 2**20)
