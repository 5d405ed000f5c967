"""Takes a step or a lane of a run again, and says how it compares with what the run wrote."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lanewise.commands.jobs.start import start
from lanewise.commands.replay.lane import LaneJob, ReplayedLane
from lanewise.commands.replay.plan import ReplayPlan, Written
from lanewise.commands.replay.replay import ReplayedStep, ReplayJob
from lanewise.processes.device.nested import plain
from lanewise.processes.world.tree_message import dump_tree
from lanewise.runs.file import writing

_MOST = 8
"""Of tensors and samples that are listed."""
EQUAL, DIFFERS, UNKNOWN = range(3)
"""The exit codes, as those of diff."""


class Found(NamedTuple):
    """What a command shows."""

    lines: Sequence[str]
    tree: Mapping[str, Any]
    """All of it, for JSON."""
    code: int


@dataclass(frozen=True)
class Compared:
    """A step beside what the run wrote of it."""

    replayed: ReplayedStep
    num_compared: int
    """How many digests and numbers the run wrote of it."""
    differing: Mapping[str, tuple[Any, Any]]
    """What the replay and the run have of each that differs."""

    @property
    def is_equal(self) -> bool:
        """Whether the run wrote something of it, and the same."""
        return self.num_compared > 0 and not self.differing

    def lines(self) -> list[str]:
        """Say what was found."""
        name, num_differing = f"step {self.replayed.step:,}", len(self.differing)
        if not self.num_compared:
            return [f"{name}: the run wrote nothing of it (integrity.digest_every_steps, log.every_steps)"]
        if not self.differing:
            return [f"{name}: as the run wrote it, in {self.num_compared} digests and numbers"]
        told = (
            f"  {name}: {mine}, and {theirs} in the run" for name, (mine, theirs) in self.differing.items()
        )
        return [f"{name}: {num_differing} of {self.num_compared} digests and numbers differ", *_some(told)]


def _some(lines: Iterable[str]) -> list[str]:
    """Return the first of some lines, and how many more there are."""
    shown = list(lines)
    rest = len(shown) - _MOST
    return [*shown[:_MOST], *[f"  and {rest} more, which --json has"] * (rest > 0)]


def compare_step(replayed: ReplayedStep, written: Written) -> Compared:
    """Compare a step with its digests and its line of metrics, as far as the run wrote them."""
    finite = {name: value if math.isfinite(value) else None for name, value in replayed.columns.items()}
    mine, line = {**replayed.digests, **finite}, written.lines.get(replayed.step, {})
    theirs = {name: value for name, value in line.items() if name.startswith(("train/", "gradients/"))}
    theirs |= written.digests.get(replayed.step, {})
    differing = {
        name: (mine.get(name, "none"), value)
        for name, value in theirs.items()
        if name not in mine or mine[name] != value
    }
    return Compared(replayed, len(theirs), differing)


def find_step(plan: ReplayPlan) -> Found:
    """Take the last step of a plan again."""
    with ReplayJob.of(plan, observed=[plan.step]) as job:
        (step,) = start(job, is_fresh=True)
    found = compare_step(step, plan.written)
    norm, rate = (step.columns[f"train/{name}"] for name in ("grad_norm", "learning_rate"))
    lines = [
        f"loss {step.loss!r}, weight {step.weight!r}, gradient norm {norm!r}, learning rate {rate!r}",
        *_some(f"  {digest}  {name}" for name, digest in step.digests.items()),
        *found.lines(),
    ]
    code = EQUAL if found.is_equal else DIFFERS if found.differing else UNKNOWN
    if code == DIFFERS and plan.config.distributed.equality == "close":
        code = UNKNOWN
        lines.append("no verdict: the run is in close, where other devices may round otherwise")
    return Found(lines, asdict(found), code)


def find_lane(plan: ReplayPlan, lane: int, batch_file: Path | None = None, *, debugs: bool = False) -> Found:
    """Run a lane of the last step of a plan again, and each of its samples.

    Args:
        plan: leads to the step.
        lane: from 0.
        batch_file: where its batch is written, as `dump_tree` does.
        debugs: whether a debugger stops in its forward, in this process.
    """
    keeps = batch_file is not None
    with LaneJob.of(plan, observed=(), lane=lane, keeps=keeps, debugs=debugs) as job:
        found: ReplayedLane = start(job, is_fresh=not debugs)
    if batch_file is not None:
        with writing(batch_file):
            batch_file.write_bytes(dump_tree(plain(found.tensors["batch"])))
    scaled = "" if found.scale == 1 else f", times the loss scale {found.scale:g}"
    lines = [
        f"samples {', '.join(map(str, found.samples))}",
        f"loss {found.loss!r}, weight {found.weight!r}",
        f"its gradient as it enters the sum: norm {math.hypot(*found.norms.values())!r}{scaled}",
        *_some(f"  {digest}  {found.norms[name]:<11.6g} {name}" for name, digest in found.digests.items()),
    ]
    if found.why_none:
        lines.append(f"no sample can be computed alone: {found.why_none}")
    else:
        worst = max(found.of_samples, key=lambda one: math.inf if math.isnan(one[1]) else one[1])
        lines += ["each sample alone, which is another computation than the lane's:"]
        lines += _some(f"  loss {value:<11.6g} sample {sample}" for sample, value in found.of_samples)
        lines += [f"the largest loss alone: sample {worst[0]}"]
    return Found(lines, asdict(replace(found, tensors={})), EQUAL)
