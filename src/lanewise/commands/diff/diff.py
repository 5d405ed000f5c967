"""Finds where two runs part: first by what they recorded, then by a replay of each."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from lanewise.commands.diff.recorded import Record, SettingPair, compare_settings
from lanewise.commands.diff.traced import Cause, DiffJob, cause_of_record, causes_in
from lanewise.commands.jobs.start import start
from lanewise.commands.recording.comparison import Parting, RecordingComparison, compare, differing
from lanewise.commands.replay.plan import plan_replay
from lanewise.commands.replay.report import compare_steps
from lanewise.commands.verify.evidence import listed
from lanewise.config.load import Override
from lanewise.errors import LanewiseError, RunDirError, printable, text_of

_MOST_CHARACTERS = 40


@dataclass(frozen=True)
class DiffReport:
    """The result of `diff`."""

    is_exact: bool
    """Whether both are `exact`, so that only a cause makes them differ."""
    last_step: int
    """The last step that both took."""
    settings: Sequence[SettingPair]
    comparison: RecordingComparison
    """Of what both wrote; see `Record.recordings`."""
    causes: Sequence[Cause] = ()
    """Found by replays; empty where none was needed, or none found one."""
    failure: str | None = None
    """Why there was no replay."""

    @property
    def is_same(self) -> bool:
        """Whether all that both wrote of the same steps is equal."""
        return not self.comparison.differing

    def table(self) -> Table:
        """Return a row for each thing in which the starts of the runs differ."""
        table = Table("differs", "first run", "second run", "from step", box=None, pad_edge=False)
        for one in self.settings:
            a, b = ("-" if value is None else printable(str(value)) for value in one.values)
            cells = one.name, a[:_MOST_CHARACTERS], b[:_MOST_CHARACTERS]
            table.add_row(*map(escape, (*cells, f"{one.first_step:,}")))
        return table

    def lines(self) -> Iterator[str]:
        """Yield where they part, and why; the last line is the result."""
        for name, one in self.comparison.parts.items():
            equal = f"equal up to step {one.last_equal:,}" if one.last_equal else ""
            unequal = f"unequal at step {one.first_unequal:,}: {listed(one.names)}" if one.unequal else ""
            yield f"{name}: {', '.join(filter(None, (equal, unequal)))}"
        yield from self.comparison.not_compared
        yield from map(str, self.causes)
        yield from [f"not replayed: {self.failure}"] if self.failure else []
        if self.is_same:
            yield f"the same{'' if 'digests' in self.comparison.parts else ', as far as metrics tell'}"
        else:
            may_round = not self.is_exact and not {"samples", "inputs"} & self.comparison.differing.keys()
            above = ", or by what differs above" if self.settings else ""
            yield f"different{f', as runs in close may be by rounding{above}' if may_round else ''}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as values of JSON."""
        return {"same": self.is_same, **asdict(self)}


def diff(
    runs: Sequence[Path],
    overrides: Sequence[Override] = (),
    *,
    trust: bool = False,
    show: Callable[[str], None] = lambda _: None,
) -> DiffReport:
    """Compare two runs, which may continue meanwhile; nothing is written into either.

    Args:
        runs: their run_dirs.
        overrides: of the configurations of both, when they are replayed.
        trust: whether code that came with the runs may run.
        show: told what is being run.

    Raises:
        RunDirError: if one is no run, or they wrote nothing that can be compared.
    """
    a, b = records = [Record(path) for path in runs]
    last_step, is_exact = min(a.last_step, b.last_step), a.is_exact and b.is_exact
    comparison = compare(a.recordings(last_step), b.recordings(last_step), partial=["metrics"])
    found = DiffReport(is_exact, last_step, compare_settings(a, b, last_step), comparison)
    if not comparison.parts:
        raise RunDirError(
            f"{runs[0]} and {runs[1]} have no line of the same step: their last ones are of steps "
            f"{a.last_step:,} and {b.last_step:,}. Wait for it, or log both after the same steps."
        )
    if found.is_same or not is_exact:
        return found
    digests = comparison.parts.get("digests", Parting())
    unequal = min(one.first_unequal or last_step for one in comparison.differing.values())
    after = min(digests.last_equal, unequal - 1)

    def take(record: Record, step: int, observed: Collection[int] = (), lane: int | None = None) -> Any:
        plan = plan_replay(record.run_dir.path, step, overrides, before=after + 1, trust=trust)
        show(f"replaying {plan.describe()}")
        path = [*sys.path]
        try:
            with DiffJob.of(plan, observed=observed, lane=lane) as job:
                given = start(job, is_fresh=True)
        finally:
            sys.path[:] = path  # else the other run could find modules of this one
        return compare_steps(plan, *given) if observed else given

    try:
        causes = list(_causes(records, digests.first_unequal or unequal, take))
    except LanewiseError as error:
        return replace(found, failure=text_of(error))
    return replace(found, causes=causes)


def _causes(records: Sequence[Record], last: int, take: Callable[..., Any]) -> Iterator[Cause]:
    """Yield why two runs part in a step up to the last one; nothing where no replay shows it."""
    a, b = (take(record, last, range(1, last + 1)) for record in records)
    for step in sorted(a.keys() | b.keys()):
        for record, taken in zip(records, (a, b), strict=True):
            if step in taken and taken[step].comparison.differing:
                yield cause_of_record(step, record.run_dir.path, taken[step])
                return
        both = ({step: taken[step].replayed} if step in taken else {} for taken in (a, b))
        found = compare(*both).differing
        if "digests" not in found:
            continue
        lane = next(iter(found["loss"].unequal), None) if "loss" in found else None
        traced = [take(record, step, lane=lane) for record in records]
        if lane is None and (lanes := [*differing(*(one["lane gradients"] for one in traced))]):
            traced = [take(record, step, lane=lanes[0]) for record in records]
        yield from causes_in(step, *traced)
        return
