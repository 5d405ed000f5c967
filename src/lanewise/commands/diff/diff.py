"""Finds where two runs part: first by what they recorded, then by a replay of each."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from lanewise.commands.diff.recorded import Parting, Record, SettingPair, compare
from lanewise.commands.diff.traced import Cause, DiffJob, cause_of_record, causes_in
from lanewise.commands.jobs.start import start
from lanewise.commands.replay.comparison import differing
from lanewise.commands.replay.plan import plan_replay
from lanewise.commands.replay.replay import ReplayJob
from lanewise.commands.replay.report import compare_step
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
    samples: Parting
    digests: Parting
    metrics: Parting
    causes: Sequence[Cause] = ()
    """Found by replays; empty where none was needed, or none found one."""
    failure: str | None = None
    """Why there was no replay."""

    @property
    def is_same(self) -> bool:
        """Whether all that both wrote of the same steps is equal."""
        return self.digests.first_unequal is self.metrics.first_unequal is None

    def table(self) -> Table:
        """Return a row for each thing in which the starts of the runs differ."""
        table = Table("differs", "first run", "second run", "steps", box=None, pad_edge=False)
        for one in self.settings:
            a, b = ("-" if value is None else printable(str(value)) for value in one.values)
            cells = one.name, a[:_MOST_CHARACTERS], b[:_MOST_CHARACTERS]
            table.add_row(*map(escape, (*cells, f"{one.first_step:,} to {one.last_step:,}")))
        return table

    def lines(self) -> Iterator[str]:
        """Yield where they part, and why; the last line is the result."""
        yield from (f"{name}: {getattr(self, name)}" for name in ("samples", "digests", "metrics"))
        yield from map(str, self.causes)
        yield from [f"not replayed: {self.failure}"] if self.failure else []
        if self.is_same:
            yield f"the same{'' if self.digests.last_equal else ', as far as metrics tell'}"
        else:
            has_cause = self.is_exact or self.samples.first_unequal
            yield f"different{'' if has_cause else ', as runs in close may be by rounding'}"

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
    settings, samples, digests, metrics = compare(a, b, last_step)
    found = DiffReport(is_exact, last_step, settings, samples, digests, metrics)
    unequal = [step for step in (digests.first_unequal, metrics.first_unequal) if step]
    if not (unequal or digests.last_equal or metrics.last_equal):
        raise RunDirError(
            f"{runs[0]} and {runs[1]} have no line of the same step: their last ones are of steps "
            f"{a.last_step:,} and {b.last_step:,}. Wait for it, or log both after the same steps."
        )
    if not (unequal and is_exact):
        return found
    after = min(digests.last_equal, min(unequal) - 1)

    def take(record: Record, step: int, observed: Collection[int] = (), lane: int | None = None) -> Any:
        plan = plan_replay(record.run_dir.path, step, overrides, before=after + 1, trust=trust)
        show(f"replaying {plan.describe()}")
        path = [*sys.path]
        try:
            with ReplayJob.of(plan, observed=observed) as job:
                of_run = DiffJob(job.config, job.task, untrusted=job.untrusted, replay=job, lane=lane)
                given = start(of_run, is_fresh=True)
        finally:
            sys.path[:] = path  # else the other run could find modules of this one
        return {one.step: compare_step(one, plan.written) for one in given} if observed else given

    try:
        causes = list(_causes(records, digests.first_unequal or unequal[0], take))
    except LanewiseError as error:
        return replace(found, failure=text_of(error))
    return replace(found, causes=causes)


def _causes(records: Sequence[Record], last: int, take: Callable[..., Any]) -> Iterator[Cause]:
    """Yield why two runs part in a step up to the last one; nothing where no replay shows it."""
    a, b = (take(record, last, range(1, last + 1)) for record in records)
    for step in sorted(a.keys() | b.keys()):
        for record, taken in zip(records, (a, b), strict=True):
            if step in taken and taken[step].comparison.differing:
                changed = taken[step].changed_sources
                yield cause_of_record(step, record.run_dir.path, take(record, step), changed)
                return
        if step not in a or step not in b or a[step].replayed.digests == b[step].replayed.digests:
            continue
        lane = next(differing(a[step].replayed.lanes, b[step].replayed.lanes), None)
        traced = [take(record, step, lane=lane) for record in records]
        if lane is None and (lanes := list(differing(*(one.gradients for one in traced)))):
            traced = [take(record, step, lane=lanes[0]) for record in records]
        yield from causes_in(step, *traced)
        return
