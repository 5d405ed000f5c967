"""Checks what `--audit` wrote: that every sample of every epoch was trained once, where it was planned.

Of a stream no plan knows the samples. There the numbers that each lane counted them by must have no gap.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

import numpy as np

import lanewise.lanes as own_orders
from lanewise.commands.verify.lane_record import MAX_LANES, LaneRecord, Lanes, count
from lanewise.commands.verify.stream_audit import StreamEpoch, StreamPlan
from lanewise.errors import CheckpointError
from lanewise.lanes import OrderInputs, SampleOrder, Schedule
from lanewise.runs.file import open_regular, reading


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
    is_of_stream: bool
    """Whether nobody planned the samples."""

    @property
    def is_good(self) -> bool:
        """Whether all was as planned."""
        return not self.problems


@final
class Audit:
    """The audit of a run, over all its starts and ranks.

    Args:
        folder: `audit` in a run directory.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        plans = folder / "plan.jsonl"
        if not os.path.lexists(plans):
            raise CheckpointError(f"there is no audit in {folder.parent}. Train with --audit.")
        with reading(plans):
            self._plans = [
                StreamPlan.from_line(line) if "stream" in line else ReadingPlan.from_line(line, folder)
                for line in _lines(plans)
            ]
        self.steps: dict[int, dict[int, list[LaneRecord]]] = defaultdict(lambda: defaultdict(list))
        """What was given, by step, which counts from 1, and lane."""
        for path in sorted(folder.glob("rank-*.jsonl")):
            with reading(path):
                for line in _lines(path):
                    step, lane = count(line["step"]), count(line["lane"])
                    self.steps[step][lane].append(LaneRecord.from_line(line, path.stem))
        if not self.steps or not self._plans or min(self.steps) < self._plans[0].first_step:
            raise CheckpointError(
                f"the audit in {folder} is empty, or not whole: a step or its plan is missing."
            )
        self.last_step = max(self.steps)

    def check(self) -> AuditReport:
        """Compare with the plan."""
        problems: list[str] = []
        notes: list[str] = []
        num_epochs = num_samples = 0
        due = first_step = self._plans[0].first_step
        seen: dict[int, Counter[int]] = defaultdict(Counter)
        epochs_of_stream: dict[int, StreamEpoch] = {}
        if first_step > 1:
            notes.append(f"steps before {first_step} were trained without --audit")
        for step, lanes in sorted(self.steps.items()):
            if due < step:
                problems.append(f"steps {due} to {step - 1}: nothing was trained")
            due = step + 1
            plan, missing = self._plan(step), self.missing_lanes(step)
            is_stopped_in = step == self.last_step and bool(missing)
            if is_stopped_in:
                notes.append(f"step {step} is not complete: the run was stopped in it")
            else:
                problems += [f"step {step}, lane {lane}: nothing was trained" for lane in missing]
            for lane, records in sorted(lanes.items()):
                with reading(self._folder):  # an order of other tables than it was made from
                    problems += _compare(step, lane, records, plan)
                num_samples += records[0].num_samples
                if isinstance(plan, ReadingPlan) and plan.order is None:
                    seen[(step - 1) // plan.schedule.steps_per_epoch + 1].update(records[0].indices)
                if skipped := records[0].num_skipped:
                    notes.append(f"step {step}, lane {lane}: {skipped} samples could not be read")
            notes += (*_equal_tensors(step, lanes), *_fewer_rows(step, lanes))
            if not missing and plan.ends_epoch(step, lanes):
                num_epochs += 1
            if isinstance(plan, StreamPlan) and not is_stopped_in:
                number = next(iter(lanes.values()))[0].epoch or 1
                begins_here = bool(epochs_of_stream) or first_step == 1
                new = StreamEpoch(plan, number, step, begins_here=begins_here)
                epochs_of_stream.setdefault(number, new).add(step, lanes)
        problems += chain.from_iterable(map(StreamEpoch.problems, epochs_of_stream.values()))
        if not any(plan.repeats for plan in self._plans):
            problems += [
                f"epoch {epoch}: sample {sample} came {count} times"
                for epoch, counts in seen.items()
                for sample, count in counts.items()
                if count > 1
            ]
        draws = any(plan.draws for plan in self._plans)
        is_of_stream = any(isinstance(plan, StreamPlan) for plan in self._plans)
        num_steps = due - first_step
        return AuditReport(problems, notes, num_steps, num_epochs, num_samples, draws, is_of_stream)

    def compare(self, other: "Audit") -> Iterator[str]:
        """Yield where the tensors of two runs differ, in steps that are complete in both."""
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
        lanes = self.steps.get(step, {})
        return [lane for lane in self._plan(step).present_lanes(step, lanes) if lane not in lanes]

    def _plan(self, step: int) -> "ReadingPlan | StreamPlan":
        """Return the plan of a step, which is that of the last start of the run at or before this step."""
        return [plan for plan in self._plans if plan.first_step <= step][-1]


@dataclass(frozen=True)
class ReadingPlan:
    """Which samples were due from a step on."""

    first_step: int
    schedule: Schedule
    order: SampleOrder | None
    """None for a class of the user, which is not imported: the folder may come from anybody."""
    repeats: bool
    draws: bool
    """Whether an epoch may lack samples that the order did not draw, or repeat samples."""

    @classmethod
    def from_line(cls, line: Mapping[str, Any], folder: Path) -> "ReadingPlan":
        """Read a line of `plan.jsonl`, and the tables beside it."""
        sizes = {key: count(line[key]) for key in ("num_samples", "global_batch_size", "micro_batch_size")}
        schedule = Schedule(**sizes, drop_last=bool(line["drop_last"]))
        if schedule.num_present_lanes(0) > MAX_LANES:
            raise ValueError(f"it plans more than {MAX_LANES} lanes")
        package, _, name = line["order"]["class_path"].rpartition(".")
        order = None
        if package == own_orders.__name__:
            loaded: dict[str, Any] = {}
            path = folder / f"plan-{line['step']:06d}.npz"
            with suppress(FileNotFoundError), open_regular(path) as file, np.load(file) as tables:
                loaded = {name: tables[name] for name in tables.files}
            inputs = OrderInputs(schedule, count(line["seed"]), {}, used=loaded)
            order = getattr(own_orders, name)(inputs, **line["order"]["init_args"])
            schedule = order.schedule
        draws = line["repeats"] or schedule.num_samples != line["num_samples"]
        return cls(count(line["step"]), schedule, order, bool(line["repeats"]), draws)

    def present_lanes(self, step: int, _lanes: Lanes) -> Sequence[int]:
        """Return the lanes that have samples in a step."""
        return range(self.schedule.num_present_lanes(step - 1))

    def ends_epoch(self, step: int, _lanes: Lanes) -> bool:
        """Tell whether a step is the last one of its epoch."""
        return step % self.schedule.steps_per_epoch == 0


def _compare(
    step: int, lane: int, records: list[LaneRecord], plan: "ReadingPlan | StreamPlan"
) -> Iterator[str]:
    place = f"step {step}, lane {lane}"
    if len(records) > 1:
        yield f"{place}: trained {len(records)} times ({', '.join(record.file for record in records)})"
    if isinstance(plan, StreamPlan) or plan.order is None:
        return
    due = plan.order.samples(next(plan.schedule.turns(range(lane, lane + 1), step - 1, step)))
    for record in records:
        if record.indices != due:
            yield f"{place}: trained on samples {list(record.indices)} instead of {list(due)} ({record.file})"


def _equal_tensors(step: int, lanes: Mapping[int, list[LaneRecord]]) -> Iterator[str]:
    """Yield lanes whose tensors are equal: samples may be equal, or the dataset may ignore its index."""
    first: dict[str, int] = {}
    for lane, records in sorted(lanes.items()):
        if not records[0].num_samples:
            continue
        other = first.setdefault(records[0].tensors, lane)
        if other != lane:
            yield f"step {step}: lanes {other} and {lane} got equal tensors for different samples"


def _fewer_rows(step: int, lanes: Mapping[int, list[LaneRecord]]) -> Iterator[str]:
    """Yield lanes whose tensors have fewer rows than samples, which may but need not mean lost samples."""
    for lane, (record, *_) in sorted(lanes.items()):
        if record.num_rows is not None and record.num_rows < record.num_samples:
            yield (
                f"step {step}, lane {lane}: collate got {record.num_samples} samples and made tensors of "
                f"{record.num_rows} rows: it may leave samples out"
            )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a file, except one that a killed run did not finish."""
    with open_regular(path) as lines:
        for line in lines:
            with suppress(ValueError):
                yield json.loads(line)
