"""Compares what two runs recorded, without running anything: how each was started, and what it computed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, final

from lanewise.commands.replay.comparison import differing
from lanewise.commands.replay.plan import OF_STEPS, Written, read_starts, read_written, start_of
from lanewise.commands.verify.audit import ReadingPlan
from lanewise.commands.verify.lane_record import MAX_LANES
from lanewise.errors import DataError, RunDirError
from lanewise.lanes import SampleOrder
from lanewise.runs.dir import RunDir
from lanewise.runs.file import reading
from lanewise.runs.report.status import read_status

_PARTS = ("config", "sources", "versions", "dataset", "devices")
"""What is compared of two starts; their commits only where sources differ."""
_OF_A_STEP = ("train/grad_norm", "train/learning_rate")
"""Columns that are no mean over the steps since the line before."""
_LANES = range(MAX_LANES)
_NUM_NAMES = 4


@final
class Record:
    """What a run has written so far, also while it continues: no lock is taken, and nothing is written.

    Args:
        path: its run_dir.

    Raises:
        CheckpointError: if its record is damaged.
        RunDirError: if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        starts = read_starts(self.run_dir)
        if not any(start["first_step"] == 1 for start in starts):
            raise RunDirError(f"there is no run in {path} (run.jsonl). Name the run_dir of a run.")
        self.starts = [start for start in starts if start_of(starts, start["first_step"]) is start]
        """The starts that took steps, the first one first."""
        self.last_step = read_status(path).step or 0
        """The last step that is known, from 1."""
        self.written = read_written(self.run_dir, 0)
        with reading(self.run_dir.record):
            self.is_exact = all(
                start["config"]["distributed"]["equality"] == "exact" for start in self.starts
            )
            for start in self.starts:
                start["plan"] = _plan(start)


@dataclass(frozen=True)
class SettingPair:
    """Something in which the starts differ that took the same steps of two runs."""

    name: str
    values: tuple[Any, Any]
    """None where a run does not have it."""
    first_step: int
    """The first of these steps, from 1."""
    last_step: int


@dataclass(frozen=True)
class Parting:
    """How far two runs are equal in something that both have of the same steps."""

    last_equal: int
    """The last step before the first unequal one, from 1; 0 where there is none."""
    first_unequal: int | None
    names: Sequence[str] = ()
    """What is unequal there: lanes, tensors, or columns."""

    @classmethod
    def of(cls, steps: Iterable[tuple[int, Sequence[str]]]) -> "Parting":
        """Make it of what is unequal after each step, in their order."""
        last_equal = 0
        for step, unequal in steps:
            if unequal:
                return cls(last_equal, step, unequal)
            last_equal = step
        return cls(last_equal, None)

    def __str__(self) -> str:
        equal = [f"equal up to step {self.last_equal:,}"] if self.last_equal else []
        if self.first_unequal is not None:
            equal.append(f"unequal at step {self.first_unequal:,}: {listed(self.names)}")
        return ", ".join(equal) or "not known of any step of both"


def compare(
    mine: Record, theirs: Record, last_step: int
) -> tuple[list[SettingPair], Parting, Parting, Parting]:
    """Return in what the starts of common steps differ, and how samples, digests and metrics part."""
    settings, samples = _settings(mine, theirs, last_step), _samples(mine, theirs, last_step)
    return settings, samples, *_written(mine.written, theirs.written)


def _settings(mine: Record, theirs: Record, last_step: int) -> list[SettingPair]:
    """Return in what the starts differ that took the steps which both runs have."""
    found: dict[str, SettingPair] = {}
    for first, last, starts in _segments(mine, theirs, last_step):
        parts = _PARTS + ("git",) * (starts[0].get("sources") != starts[1].get("sources"))
        a, b = (dict(_flat({part: start.get(part, {}) for part in parts})) for start in starts)
        for name in differing(a, b):
            values = a.get(name), b.get(name)
            key = repr((name, values))
            if name != "config.train.run_dir":
                begin = found[key].first_step if key in found else first
                found[key] = SettingPair(name, values, begin, last)
    return list(found.values())


def _samples(mine: Record, theirs: Record, last_step: int) -> Parting:
    """Return from which step on the orders of two runs give their lanes other samples."""

    def steps() -> Iterator[tuple[int, list[str]]]:
        for first, last, starts in _segments(mine, theirs, last_step):
            if starts[0]["plan"] != starts[1]["plan"]:
                pairs = zip((mine, theirs), starts, strict=True)
                known = [order for run, start in pairs if (order := _order(run, start)) is not None]
                if len(known) < 2:
                    continue
                # What differs between two orders shows within an epoch.
                stop = first + max(order.schedule.steps_per_epoch for order in known)
                for step in range(first - 1, min(last, stop)):
                    a, b = (
                        {turn.lane: of.samples(turn) for turn in of.schedule.turns(_LANES, step, step + 1)}
                        for of in known
                    )
                    yield step + 1, [f"lane {lane}" for lane in differing(a, b)]
            if "order" in starts[0]["plan"]:
                yield last, []

    return Parting.of(steps())


def _plan(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determines the samples of a start's lanes; without an order of a stream."""
    config = start["config"]
    return {**start.get("dataset", {}), **config["batch"], "seed": config["train"]["seed"], "repeats": False}


def _order(run: Record, start: Mapping[str, Any]) -> SampleOrder | None:
    """Return the order of a start's samples; None where the record does not tell.

    It does not tell of a stream, of an order of the user's, and of one that needs a table that only `--audit`
    keeps.
    """
    plan = {**start["plan"], "step": start["first_step"]}
    with reading(run.run_dir.record), suppress(DataError):
        return ReadingPlan.from_line(plan, run.run_dir.audit).order if "order" in plan else None
    return None


def _written(mine: Written, theirs: Written) -> tuple[Parting, Parting]:
    """Compare the digests and the metrics that both runs wrote of the same steps."""
    digests = (
        (step, list(differing(mine.digests[step], theirs.digests[step])))
        for step in sorted(mine.digests.keys() & theirs.digests.keys())
    )
    a, b = dict(_metrics(mine)), dict(_metrics(theirs))
    metrics = (
        (step, [key[1] for key in keys if a[key] != b[key]])
        for step, keys in groupby(sorted(a.keys() & b.keys()), key=itemgetter(0))
    )
    return Parting.of(digests), Parting.of(metrics)


def listed(names: Sequence[Any]) -> str:
    """Name the first ones of many."""
    more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
    return ", ".join(map(str, names[:_NUM_NAMES])) + more


def _metrics(written: Written) -> Iterator[tuple[tuple[int, str, int], Any]]:
    """Yield what was computed by its step, its name, and the number of steps of which it is a mean."""
    before = 0
    for step, line in written.lines.items():
        for name, value in line.items():
            if name.startswith(OF_STEPS):
                yield (step, name, 1 if name in _OF_A_STEP else step - before), value
        before = step
    for step, values in written.evaluations.items():
        yield from (((step, name, 1), value) for name, value in values.items())


def _segments(mine: Record, theirs: Record, last_step: int) -> Iterator[tuple[int, int, tuple[Any, Any]]]:
    """Yield the first and the last of steps that the same two starts took, and these starts."""
    starts = {start["first_step"] for record in (mine, theirs) for start in record.starts}
    firsts = sorted(step for step in starts if step <= last_step)
    for first, following in zip(firsts, [*firsts[1:], last_step + 1], strict=True):
        yield first, following - 1, (start_of(mine.starts, first), start_of(theirs.starts, first))


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in _flat(value))
        else:
            yield key, value
