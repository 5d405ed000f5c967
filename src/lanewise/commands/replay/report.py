"""Compares steps that are taken again with what their run wrote, and audits a run by some of its steps."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from lanewise.commands.jobs.api import start_fresh
from lanewise.commands.recording.comparison import Recording, RecordingComparison, compare
from lanewise.commands.replay.plan import ReplayPlan, plan_replay, read_written
from lanewise.commands.replay.replay import ReplayJob
from lanewise.config.load import Override
from lanewise.errors import CheckpointError
from lanewise.runs.dir import RunDir

_WRITTEN = ("metrics", "digests", "evaluation")
"""What a run may write of a step, if it is asked to; else also what `--audit` writes."""
_MOST = 8


@dataclass(frozen=True)
class Compared:
    """What was taken again, beside what the run wrote of it."""

    name: str
    comparison: RecordingComparison
    replayed: Recording = field(default_factory=dict)
    """What it gave, if it was a whole step; see `ReplayJob`."""
    changed_sources: Sequence[str] = ()
    """Says which modules are not those of the run."""
    is_exact: bool = True
    """Whether equal bytes are promised here."""

    @property
    def code(self) -> int:
        """What diff exits with: 0 equal, 1 different; 2 where nothing tells, or rounding may differ."""
        if not self.comparison.num_compared or (self.comparison.differing and not self.is_exact):
            return 2
        return 1 if self.comparison.differing else 0

    def __str__(self) -> str:
        """Say what the step gave, and how that compares."""
        step, shown = self.replayed, list[str]()
        if step:
            norm, rate = (step["metrics"][f"train/{name}"] for name in ("grad_norm", "learning_rate"))
            head = f"loss {step['totals']['loss']!r}, weight {step['totals']['weight']!r}"
            shown = [f"{head}, gradient norm {norm!r}, learning rate {rate!r}"]
            shown += some(f"  {digest}  {name}" for name, digest in step["digests"].items())
        return "\n".join([*shown, *self.verdict(), *self.notes()])

    def verdict(self) -> list[str]:
        """Say how it compares."""
        count, differing = self.comparison.num_compared, self.comparison.differing
        if not count:
            keys = "integrity.digest_every_steps, log.every_steps" if self.replayed else "--audit"
            return [f"{self.name}: the run wrote nothing of it ({keys})"]
        if not differing:
            return [f"{self.name}: as the run wrote it, in {count} digests and numbers"]
        told = [
            f"  {f'{part} of {name}' if name.startswith('lane ') else name}: {mine}, and {theirs} in the run"
            for part, one in differing.items()
            for name, (mine, theirs) in zip(one.names, one.unequal.values(), strict=True)
        ]
        why = "" if self.is_exact else " (rounding may differ: no verdict)"
        return [f"{self.name}: {len(told)} of {count} digests and numbers differ{why}", *some(told)]

    def notes(self) -> list[str]:
        """Say which code is another one, and last what only the run has or the replay."""
        return [*self.changed_sources, *self.comparison.not_compared]


def some(lines: Iterable[str]) -> list[str]:
    """Return the first of some lines, and how many more there are."""
    shown = list(lines)
    rest = len(shown) - _MOST
    return [*shown[:_MOST], *[f"  and {rest} more, which --json has"] * (rest > 0)]


def lane_lines(found: Mapping[str, Any]) -> list[str]:
    """Show what a `LaneJob` found, of its samples the one with the largest loss first."""
    why = f" (not all: {found['why_not']})" if found["why_not"] else ""
    norms, alone = found["norms"], sorted(found["alone"], key=lambda one: (not math.isnan(one[1]), -one[1]))
    missing = f" (missing: {', '.join(map(str, found['missing']))})" if found["missing"] else ""
    return [
        f"samples {', '.join(map(str, found['samples']))}{missing}",
        f"loss {found['loss']!r}, weight {found['weight']!r}, loss scale {found['scale']:g}",
        f"its gradient, as it enters the sum: norm {math.hypot(*norms.values())!r}",
        *some(f"  {digest}  {norms[name]:<11.6g} {name}" for name, digest in found["digests"].items()),
        f"each sample alone, another computation than the lane's, the largest first{why}:",
        *some(f"  loss {value:<11.6g} sample {sample}" for sample, value in alone),
    ]


def compare_steps(
    plan: ReplayPlan, taken: Mapping[int, Recording], changed_sources: Sequence[str] = ()
) -> dict[int, Compared]:
    """Compare steps with what the run wrote of them, by what a `ReplayJob` returned."""
    found: dict[int, Compared] = {}
    for step, recording in taken.items():
        theirs = plan.written.get(step, {})
        mine = {part: values for part, values in recording.items() if part in {*_WRITTEN, *theirs}}
        name, comparison = f"step {step:,}", compare({step: mine}, {step: theirs})
        found[step] = Compared(name, comparison, recording, changed_sources, plan.is_exact)
    return found


def compare_lane(found: Mapping[str, Any], plan: ReplayPlan, lane: int) -> Compared:
    """Compare what a `LaneJob` found with what the run wrote of this lane, if it did."""
    written = plan.written.get(plan.step, {}).items()
    theirs: dict[str, Mapping[Any, Any]] = {part: {lane: one[lane]} for part, one in written if lane in one}
    lines = (one["metrics"] for step, one in plan.written.items() if step >= plan.step and "metrics" in one)
    largest = next(lines, {}).get("largest_loss")
    if isinstance(largest, dict) and (largest.get("step"), largest.get("lane")) == (plan.step, lane):
        theirs["largest_loss"] = {name: largest.get(name) for name in ("loss", "samples")}
    mine: Recording = {
        "samples": {lane: tuple(found["samples"])},
        "inputs": {lane: found["inputs"]},
        "largest_loss": {name: found[name] for name in ("loss", "samples")},
    }
    comparison = compare({plan.step: {part: mine[part] for part in theirs}}, {plan.step: theirs})
    name = f"lane {lane} of step {plan.step:,}"
    return Compared(name, comparison, {}, found["changed_sources"], plan.is_exact)


def replay_steps(plan: ReplayPlan, steps: Sequence[int]) -> list[Compared]:
    """Take the steps of a plan again, in fresh processes, and compare some of them."""
    with ReplayJob.of(plan, observed=steps) as job:
        return [*compare_steps(plan, *start_fresh(job)).values()]


@dataclass(frozen=True)
class ReplayAudit:
    """Steps of a run that were drawn and compared, and what share of it was seen by that."""

    seed: int
    """Of the draw."""
    compared: Sequence[Compared]
    num_steps: int
    """Of the run."""
    num_seen: int
    """Steps that were taken again, and whose updates show in what was compared after them."""

    @property
    def code(self) -> int:
        """What diff exits with; see `Compared`."""
        return max(one.code for one in self.compared)

    def __str__(self) -> str:
        """Say what was found."""
        seen = f"{self.num_seen:,} of the run's {self.num_steps:,} ({self.num_seen / self.num_steps:.1%})"
        lines = [
            *(line for one in self.compared for line in one.verdict()),
            f"drawn with seed {self.seed}: {len(self.compared)} steps. Steps whose updates were seen: {seen}",
            *dict.fromkeys(line for one in self.compared for line in one.notes()),
        ]
        return "\n".join(lines)


def audit(run_dir: Path, count: int, seed: int, overrides: Sequence[Override], **given: Any) -> ReplayAudit:
    """Draw steps of which the run wrote something, take each again from its checkpoint, and compare.

    Args:
        run_dir: of the run.
        count: how many steps to draw.
        seed: of the draw.
        overrides: as for `plan_replay`.
        given: likewise.

    Raises:
        CheckpointError: if the run wrote nothing that can be compared, or does not promise equal bytes.
    """
    written = read_written(RunDir(run_dir), 0)
    steps = {part: [step for step in written if part in written[step]] for part in ("digests", "metrics")}
    known = sorted(steps["digests"] or steps["metrics"])
    drawn = sorted(random.Random(seed).sample(known, min(count, len(known))))
    plans = [plan_replay(run_dir, step, overrides, **given) for step in drawn]
    if not plans or any(plan.config.distributed.equality != "exact" for plan in plans):
        raise CheckpointError(
            f"{run_dir} has no steps to audit: it needs distributed.equality exact, and lines of metrics or "
            "digests (integrity.digest_every_steps)."
        )
    compared, seen = list[Compared](), set[int]()
    for num_taken, group in groupby(plans, key=lambda plan: plan.num_taken):
        of_group = list(group)
        found = replay_steps(of_group[-1], [plan.step for plan in of_group])
        for plan, one in zip(of_group, found, strict=True):
            # A line of metrics is of the weights before the update of its step.
            is_update_seen = "digests" in one.comparison.parts
            seen |= set(range(num_taken, plan.step if is_update_seen else plan.step - 1))
        compared += found
    return ReplayAudit(seed, compared, max(written), len(seen))
