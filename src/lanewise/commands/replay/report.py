"""Compares steps that are taken again with what their run wrote, and audits a run by some of its steps."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from lanewise.commands.jobs.start import start
from lanewise.commands.replay.plan import ReplayPlan, Written, plan_replay, read_written
from lanewise.commands.replay.replay import ReplayedStep, ReplayJob
from lanewise.config.load import Override
from lanewise.errors import CheckpointError
from lanewise.runs.dir import RunDir

_MOST = 8


@dataclass(frozen=True)
class Compared:
    """A step beside what the run wrote of it."""

    replayed: ReplayedStep
    num_compared: int
    """How many digests and numbers the run wrote of it."""
    differing: Mapping[str, tuple[Any, Any]]
    """What the replay and the run have of each that differs."""
    is_exact: bool = True
    """Whether equal bytes are promised here."""

    @property
    def code(self) -> int:
        """What diff exits with: 0 equal, 1 different; 2 where nothing tells, or rounding may differ."""
        if not self.num_compared or (self.differing and not self.is_exact):
            return 2
        return 1 if self.differing else 0

    def shown(self) -> list[str]:
        """Say what the step gave, and how that compares."""
        step = self.replayed
        norm, rate = (step.columns[f"train/{name}"] for name in ("grad_norm", "learning_rate"))
        head = f"loss {step.loss!r}, weight {step.weight!r}, gradient norm {norm!r}, learning rate {rate!r}"
        digests = some(f"  {digest}  {name}" for name, digest in step.digests.items())
        return [head, *digests, *self.lines()]

    def lines(self) -> list[str]:
        """Say how the step compares."""
        step, count = self.replayed, self.num_compared
        name = f"step {step.step:,}"
        if not count:
            return [f"{name}: the run wrote nothing of it (integrity.digest_every_steps, log.every_steps)"]
        if not self.differing:
            return [f"{name}: as the run wrote it, in {count} digests and numbers", *step.changed_sources]
        told = (f"  {one}: {mine}, and {theirs} in the run" for one, (mine, theirs) in self.differing.items())
        why = "" if self.is_exact else " (rounding may differ: no verdict)"
        head = f"{name}: {len(self.differing)} of {count} digests and numbers differ{why}"
        return [head, *some(told), *step.changed_sources]


def some(lines: Iterable[str]) -> list[str]:
    """Return the first of some lines, and how many more there are."""
    shown = list(lines)
    rest = len(shown) - _MOST
    return [*shown[:_MOST], *[f"  and {rest} more, which --json has"] * (rest > 0)]


def lane_lines(found: Mapping[str, Any]) -> list[str]:
    """Show what a `LaneJob` found, of its samples the one with the largest loss first."""
    why = f" (none: {found['why_none']})" if found["why_none"] else ""
    norms, alone = found["norms"], sorted(found["alone"], key=lambda one: (not math.isnan(one[1]), -one[1]))
    return [
        f"samples {', '.join(map(str, found['samples']))}",
        f"loss {found['loss']!r}, weight {found['weight']!r}, loss scale {found['scale']:g}",
        f"its gradient, as it enters the sum: norm {math.hypot(*norms.values())!r}",
        *some(f"  {digest}  {norms[name]:<11.6g} {name}" for name, digest in found["digests"].items()),
        f"each sample alone, another computation than the lane's, the largest first{why}:",
        *some(f"  loss {value:<11.6g} sample {sample}" for sample, value in alone),
        *found["changed_sources"],
    ]


def compare_step(replayed: ReplayedStep, written: Written) -> Compared:
    """Compare a step with its digests and its line of metrics, as far as the run wrote them."""
    finite = {name: value if math.isfinite(value) else None for name, value in replayed.columns.items()}
    mine, line = {**replayed.digests, **finite}, written.lines.get(replayed.step, {})
    theirs = {name: value for name, value in line.items() if name.startswith(("train/", "gradients/"))}
    theirs |= written.digests.get(replayed.step, {})
    pairs = {name: (mine.get(name, "none"), value) for name, value in theirs.items()}
    differing = {name: (now, then) for name, (now, then) in pairs.items() if now != then}
    return Compared(replayed, len(theirs), differing)


def replay_steps(plan: ReplayPlan, steps: Sequence[int]) -> list[Compared]:
    """Take the steps of a plan again, in fresh processes, and compare some of them."""
    is_exact = plan.config.distributed.equality == "exact" and not plan.allow
    with ReplayJob.of(plan, observed=steps) as job:
        found = [compare_step(step, plan.written) for step in start(job, is_fresh=True)]
    return [replace(one, is_exact=is_exact) for one in found]


@dataclass(frozen=True)
class ReplayAudit:
    """Steps of a run that were drawn and compared, and what share of it was seen by that."""

    seed: int
    """Of the draw."""
    compared: Sequence[Compared]
    num_steps: int
    """Of the run."""
    num_seen: int
    """Steps that were taken again, from the checkpoints to the steps that were drawn."""

    def chance(self, num_wrong: int) -> float:
        """Return with what probability so many wrong steps, wherever they are, would have been found."""
        unseen = self.num_steps - self.num_seen
        return 1 - math.comb(unseen, num_wrong) / math.comb(self.num_steps, num_wrong)

    def lines(self) -> list[str]:
        """Say what was found."""
        told = [f"{self.chance(wrong):.1%} if {wrong}" for wrong in (1, 10, 100) if wrong <= self.num_steps]
        seen = f"{self.num_seen:,} of the run's {self.num_steps:,} ({self.num_seen / self.num_steps:.1%})"
        return [
            *(line for one in self.compared for line in one.lines()),
            f"drawn with seed {self.seed}: {len(self.compared)} steps. Taken again up to them: {seen}",
            f"chance to find wrong steps of all, wherever they are: {', '.join(told)} of them are wrong",
        ]


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
    known = sorted(written.digests or written.lines)
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
        seen |= set(range(num_taken, of_group[-1].step))
        compared += replay_steps(of_group[-1], [plan.step for plan in of_group])
    return ReplayAudit(seed, compared, max(known), len(seen))
