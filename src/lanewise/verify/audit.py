"""Checks what `--audit` wrote: that every sample of every epoch was trained once, where it was planned."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lanewise.lanes as own_orders
from lanewise.errors import CheckpointError
from lanewise.lanes import OrderInputs, SampleOrder, Schedule


@dataclass(frozen=True)
class Given:
    """What one lane was given in a step."""

    indices: tuple[int, ...]
    tensors: str
    """Hash of the tensors."""
    num_rows: int | None
    """First dimension that all of them have; None if they have none in common."""
    num_skipped: int
    """Samples that could not be read, and were left out."""
    file: str
    """Name of the file that says so, which names the rank."""


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    problems: list[str]
    """Each is a sample that was left out, trained twice, or in another place than planned."""
    notes: list[str]
    num_steps: int
    num_epochs: int
    """Complete epochs."""
    num_samples: int
    """Samples of all steps together."""
    draws: bool
    """Whether the order drew samples, so that one may never come, or come more than once."""

    @property
    def is_good(self) -> bool:
        """Whether all was as planned."""
        return not self.problems


class Audit:
    """The audit of a run, over all its starts and ranks.

    Args:
        folder: `audit` in a run directory.

    Raises:
        CheckpointError: if there is none.
    """

    def __init__(self, folder: Path) -> None:
        plans = folder / "plan.jsonl"
        if not plans.exists():
            raise CheckpointError(f"there is no audit in {folder.parent}. Train with --audit.")
        self._plans = [_Plan.from_line(line, folder) for line in _lines(plans)]
        self.steps: dict[int, dict[int, list[Given]]] = defaultdict(lambda: defaultdict(list))
        """What was given, by step and lane."""
        for path in sorted(folder.glob("rank-*.jsonl")):
            for line in _lines(path):
                given = Given(
                    tuple(line["indices"]), line["tensors"], line.get("rows"), line["skipped"], path.stem
                )
                self.steps[line["step"]][line["lane"]].append(given)
        if not self.steps:
            raise CheckpointError(f"the audit in {folder} is empty: no step was trained.")
        self.last_step = max(self.steps)

    def check(self) -> AuditReport:
        """Compare with the plan."""
        problems: list[str] = []
        notes: list[str] = []
        num_epochs = num_samples = 0
        first_step = min(plan.first_step for plan in self._plans)
        seen: dict[int, Counter[int]] = defaultdict(Counter)
        if first_step:
            notes.append(f"steps before {first_step} were trained without --audit")
        for step in range(first_step, self.last_step + 1):
            plan = self._plan(step)
            lanes = self.steps.get(step, {})
            missing = self.missing_lanes(step)
            if step == self.last_step and missing:
                notes.append(f"step {step} is not complete: the run was stopped in it")
            else:
                problems += [f"step {step}, lane {lane}: nothing was trained" for lane in missing]
            for lane, given in sorted(lanes.items()):
                problems += _compare(step, lane, given, plan)
                num_samples += len(given[0].indices) - given[0].num_skipped
                if plan.order is None:
                    seen[step // plan.schedule.steps_per_epoch].update(given[0].indices)
                if given[0].num_skipped:
                    skipped = given[0].num_skipped
                    notes.append(f"step {step}, lane {lane}: {skipped} samples could not be read")
            notes += _equal_tensors(step, lanes)
            notes += _fewer_rows(step, lanes)
            num_epochs += (step + 1) % plan.schedule.steps_per_epoch == 0 and not missing
        repeats = any(plan.repeats for plan in self._plans)
        if not repeats:
            problems += [
                f"epoch {epoch}: sample {sample} came {count} times"
                for epoch, counts in seen.items()
                for sample, count in counts.items()
                if count > 1
            ]
        num_steps = self.last_step + 1 - first_step
        draws = any(plan.draws for plan in self._plans)
        return AuditReport(problems, notes, num_steps, num_epochs, num_samples, draws)

    def compare(self, other: "Audit") -> Iterator[str]:
        """Say where the tensors of two runs differ, in the steps that both have complete."""
        common = sorted(self.steps.keys() & other.steps.keys())
        if common and (self.missing_lanes(common[-1]) or other.missing_lanes(common[-1])):
            common.pop()  # a run was stopped in it
        if not common:
            yield "the runs have no complete step in common"
        for step in common:
            mine, theirs = self.steps[step], other.steps[step]
            for lane in sorted(mine.keys() | theirs.keys()):
                if lane not in mine or lane not in theirs:
                    yield f"step {step}, lane {lane}: only one of the runs has it"
                elif mine[lane][0].tensors != theirs[lane][0].tensors:
                    yield f"step {step}, lane {lane}: the tensors differ"

    def missing_lanes(self, step: int) -> list[int]:
        """Return the lanes of a step that were given nothing."""
        num_lanes = self._plan(step).schedule.num_present_lanes(step)
        return [lane for lane in range(num_lanes) if lane not in self.steps.get(step, {})]

    def _plan(self, step: int) -> "_Plan":
        """Return what was due in a step: by the last start of the run at this step or before."""
        return [plan for plan in self._plans if plan.first_step <= step][-1]


@dataclass(frozen=True)
class _Plan:
    """Which samples were due from a step on."""

    first_step: int
    schedule: Schedule
    order: SampleOrder | None
    """None for one of a class of the user's, which is not imported: a run's folder may be anybody's."""
    repeats: bool
    draws: bool
    """Whether an epoch leaves out samples that the order did not draw, or repeats some."""

    @classmethod
    def from_line(cls, line: Mapping[str, Any], folder: Path) -> "_Plan":
        """Read a line of `plan.jsonl`, and the tables beside it."""
        schedule = Schedule(
            line["num_samples"], line["global_batch_size"], line["micro_batch_size"], line["drop_last"]
        )
        package, _, name = line["order"]["class_path"].rpartition(".")
        order = None
        if package == own_orders.__name__:
            loaded: dict[str, Any] = {}
            with suppress(FileNotFoundError), np.load(folder / f"plan-{line['step']:06d}.npz") as tables:
                loaded = {name: tables[name] for name in tables.files}
            inputs = OrderInputs(schedule, line["seed"], {}, used=loaded)
            order = getattr(own_orders, name)(inputs, **line["order"]["init_args"])
            schedule = order.schedule
        draws = line["repeats"] or schedule.num_samples != line["num_samples"]
        return cls(line["step"], schedule, order, line["repeats"], draws)


def _compare(step: int, lane: int, given: list[Given], plan: _Plan) -> Iterator[str]:
    if len(given) > 1:
        files = ", ".join(one.file for one in given)
        yield f"step {step}, lane {lane}: trained {len(given)} times ({files})"
    if plan.order is None:
        return
    due = plan.order.samples(next(plan.schedule.turns(range(lane, lane + 1), step, step + 1)))
    for one in given:
        if one.indices != due:
            yield (
                f"step {step}, lane {lane}: trained on samples {list(one.indices)} instead of {list(due)} "
                f"({one.file})"
            )


def _equal_tensors(step: int, lanes: Mapping[int, list[Given]]) -> Iterator[str]:
    """Note lanes whose tensors are equal: maybe equal samples, maybe a dataset that ignores its index."""
    first: dict[str, int] = {}
    for lane, given in sorted(lanes.items()):
        other = first.setdefault(given[0].tensors, lane)
        if other != lane:
            yield f"step {step}: lanes {other} and {lane} got equal tensors for different samples"


def _fewer_rows(step: int, lanes: Mapping[int, list[Given]]) -> Iterator[str]:
    """Note lanes whose tensors may lack samples: rows need not be samples."""
    for lane, given in sorted(lanes.items()):
        num_rows, num_samples = given[0].num_rows, len(given[0].indices) - given[0].num_skipped
        if num_rows is not None and num_rows < num_samples:
            yield (
                f"step {step}, lane {lane}: collate got {num_samples} samples and made tensors of {num_rows} "
                "rows: it may leave samples out"
            )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines, without one that a killed run left unfinished."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
