"""Finds what a step of a run is taken again from: the starts up to it, and a good checkpoint before it."""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

from lanewise.commands.jobs.evaluate import require_buildable
from lanewise.commands.jobs.provenance import NOT_FINITE
from lanewise.commands.recording.comparison import Recording
from lanewise.commands.verify.audit import Audit
from lanewise.config import RunConfig
from lanewise.config.check import expand_user, read_section, show
from lanewise.config.load import Override, apply_overrides
from lanewise.config.trust import distrust
from lanewise.errors import CheckpointError, ConfigError, collecting
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.cut import is_evaluation
from lanewise.runs.dir import RunDir
from lanewise.runs.file import reading
from lanewise.runs.report.lines import JsonLinesReader
from lanewise.task import Task

logger = logging.getLogger(__name__)

OF_STEPS = ("train/", "gradients/", "largest_loss")
"""How the columns of a line of metrics begin that are no times."""
_KEPT = ("equality", "threads", "device_type", "stall_seconds", "start_seconds")
"""What a replay takes over of the section distributed, on which no byte depends else."""


_DICTS = ("config", "sources", "git", "versions", "dataset")
_KINDS = dict.fromkeys(_DICTS, dict) | {"allow": list, "last_step": int}
"""What the record of a start has."""


@dataclass(frozen=True)
class Segment:
    """Steps that one start of the run took, with what it was asked for."""

    config: RunConfig
    allow: tuple[str, ...]
    """What may differ from the checkpoint with which the segment begins."""
    last_step: int
    """The last of them that is taken again, from 1."""


@dataclass(frozen=True)
class ReplayPlan:
    """From where a step is taken again, and with what."""

    run_dir: RunDir
    step: int
    """The last step that is taken again, from 1."""
    num_taken: int
    """How many steps the run had taken at the checkpoint; 0: it begins anew, from its seed."""
    segments: Sequence[Segment]
    """The starts since then; most often one."""
    starts: Sequence[Mapping[str, Any]]
    """What run.jsonl has of the starts since then; the last one took the step."""
    written: Mapping[int, Recording]
    """What the run wrote of the steps after the checkpoint; see `read_written`."""
    allow: tuple[str, ...] = ()
    """`exact`: what equal bytes depend on besides the configuration may differ from where the run was."""
    task: Task | None = None
    untrusted: tuple[str, ...] = ()

    @property
    def start(self) -> Mapping[str, Any]:
        """What run.jsonl has of the start that took the step."""
        return self.starts[-1]

    @property
    def config(self) -> RunConfig:
        """The configuration of the start that took the step."""
        return self.segments[-1].config

    @property
    def is_exact(self) -> bool:
        """Whether equal bytes are promised here."""
        return self.config.distributed.equality == "exact" and "exact" not in self.allow

    def describe(self) -> str:
        """Say what will be done."""
        num_steps = self.step - self.num_taken
        place = f"the checkpoint after step {self.num_taken:,}" if self.num_taken else "the seed"
        steps = "1 step" if num_steps == 1 else f"{num_steps:,} steps"
        return f"step {self.step:,} of {self.run_dir.path}: {steps} from {place}"


def plan_replay(
    run_dir: Path,
    step: int,
    overrides: Sequence[Override] = (),
    *,
    before: int | None = None,
    task: Task | None = None,
    trust: bool = False,
    allow: Collection[str] = (),
) -> ReplayPlan:
    """Find the start of a run that took a step, and the newest good checkpoint before it.

    Nothing is written to the run, and no lock is taken: it may go on meanwhile.

    Args:
        run_dir: of the run.
        step: from 1.
        overrides: of the configuration; without one of the devices, there is one process.
        before: the checkpoint is one of fewer steps than this; None: than `step`.
        task: the user's task, where it was given as an object; None: built from the configuration.
        trust: whether code that came with the run may run.
        allow: see `ReplayPlan`.

    Raises:
        CheckpointError: if the folder holds no run, or the run has not begun the step.
        ConfigError: if the configuration has a mistake.
    """
    folder = RunDir(run_dir)
    starts = [one for one in read_starts(folder) if {"distributed", "train"} <= one["config"].keys()]
    if step < 1 or not any(start["first_step"] == 1 for start in starts):
        what = f"step {step} is none: they count from 1" if starts else f"{run_dir} holds no run"
        raise CheckpointError(f"{what}. Name a run_dir, whose run.jsonl is whole, and a step of the run.")
    chain = [start_of(starts, step)]
    last_step = chain[0].get("last_step")
    if last_step is not None and step > last_step:
        raise CheckpointError(f"the run {run_dir} has {last_step} steps: got step {step}. Name one of them.")
    num_taken = _newest_good(folder, (before or step) - 1)
    while chain[0]["first_step"] - 1 > num_taken:
        chain.insert(0, start_of(starts, chain[0]["first_step"] - 1))
    segments: list[Segment] = []
    untrusted: tuple[str, ...] = ()
    for number, start in enumerate(chain):
        config = _config_of(start, folder, overrides)
        if task is None:
            require_buildable(config, folder)
        if not trust:
            config, untrusted = distrust(folder.path, config, overrides)
        last = step if start is chain[-1] else chain[number + 1]["first_step"] - 1
        resumes = number > 0 or start["first_step"] - 1 == num_taken > 0
        may_differ = tuple(start.get("allow", ())) if resumes else ()
        if segments and not may_differ and segments[-1].config == config:
            segments[-1] = replace(segments[-1], last_step=last)
        else:
            segments.append(Segment(config, may_differ, last))
    written, given = read_written(folder, num_taken, step), (tuple(allow), task, untrusted)
    return ReplayPlan(folder, step, num_taken, segments, chain, written, *given)


def read_written(run_dir: RunDir, after: int, up_to: int | None = None) -> dict[int, Recording]:
    """Read what a run wrote of the steps after one, up to another and its next line, or to the end.

    The parts are `metrics`, the line without its times, with the numbers of the steps since the line before;
    `digests`, of each tensor of the state; `evaluation`, the values of that after the step, None for one that
    is not finite; with `--audit` the `samples` and `inputs` of each lane. What else there is, and a replay
    gives nothing of, is a part by its name.
    """
    written = defaultdict[int, dict[str, Mapping[Any, Any]]](dict)
    last_line = 0
    for line in JsonLinesReader(run_dir.metrics):
        step = line.get("step")
        if type(step) is not int or step < after:
            continue
        if "train/learning_rate" in line and (up_to is None or last_line < up_to):
            last_line = step
            columns = {name: value for name, value in line.items() if name.startswith(OF_STEPS)}
            written[step]["metrics"] = columns
        elif up_to is not None and step > up_to:
            continue
        elif line.get("event") == "digests" and isinstance(line.get("digests"), dict):
            written[step]["digests"] = line["digests"]
        elif is_evaluation(line):
            values = {name: value for name, value in line.items() if "/" in name}
            written[step]["evaluation"] = {n: v for n, v in values.items() if type(v) in (float, NoneType)}
        else:
            written[step][f"{line.get('event', 'data')} line"] = {}
    for folder in CheckpointFolder(run_dir.checkpoints, up_to).all():
        try:
            manifest = Manifest.read(folder)
        except CheckpointError:  # damaged, or removed meanwhile
            continue
        if manifest.digests and manifest.step > after:
            written[manifest.step].setdefault("digests", manifest.digests)
    for step, lanes in _audited(run_dir):
        if after < step <= (up_to or step):
            written[step] |= lanes
    return dict(written)


def _audited(run_dir: RunDir) -> Iterator[tuple[int, Recording]]:
    """Yield what `--audit` wrote of the steps of which it has all lanes; nothing where it is damaged."""
    if not run_dir.audit.exists():
        return
    try:
        audit = Audit(run_dir.audit)
    except CheckpointError as error:
        logger.warning("%s", error)
        return
    for step, lanes in audit.steps.items():
        if not audit.missing_lanes(step):
            records = {lane: one for lane, (one, *_) in sorted(lanes.items()) if one.indices}
            samples = {lane: one.indices for lane, one in records.items()}
            yield step, {"samples": samples, "inputs": {lane: one.tensors for lane, one in records.items()}}


def read_starts(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the lines of run.jsonl that tell of a start, the first one first."""
    starts = [
        {name: value for name, value in line.items() if value is not None}
        for line in JsonLinesReader(run_dir.record)
        if line.get("event") == "start" and type(line.get("first_step")) is int
    ]
    for start in starts:
        if wrong := [name for name, kind in _KINDS.items() if not isinstance(start.get(name, kind()), kind)]:
            raise CheckpointError(
                f"{run_dir.record} is damaged: of the start at step {start['first_step']}, {wrong[0]} is "
                f"{show(start[wrong[0]])}. Restore the file."
            )
    return [start for start in starts if "config" in start]


def start_of(starts: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any]:
    """Return the start that took a step, from 1: the last that began with it or before.

    Lines of a step that a later start took again are gone; so is what an earlier one did there.
    """
    return [start for start in starts if start["first_step"] <= step][-1]


def _newest_good(run_dir: RunDir, up_to: int) -> int:
    """Return the number of steps of the newest good checkpoint that is not of more; 0 if there is none."""
    try:
        found = CheckpointFolder(run_dir.checkpoints, up_to).newest_good(logger.warning)
    except CheckpointError as error:
        logger.warning("%s", error)
        return 0
    return 0 if found is None else found[1].step


def _config_of(start: Mapping[str, Any], run_dir: RunDir, overrides: Sequence[Override]) -> RunConfig:
    """Return the configuration of a start, for one process of this machine unless overrides say otherwise."""
    with reading(run_dir.record):
        tree: dict[str, Any] = json.loads(json.dumps(start["config"]), object_hook=_number)
        section = {key: value for key, value in tree["distributed"].items() if key in _KEPT}
        if "gpu" not in start.get("versions", {}):
            section["device_type"] = "cpu"
        tree |= {"distributed": section, "train": {**tree["train"], "run_dir": str(run_dir.path)}}
    tree, mistakes = apply_overrides(tree, overrides)
    with collecting(mistakes):
        config = read_section(RunConfig, tree)
    if mistakes:
        raise ConfigError(*mistakes)
    search_path = Path.cwd() / expand_user(config.search_path or "")
    return replace(config, search_path=os.path.realpath(search_path), callbacks=())


def _number(found: dict[str, Any]) -> Any:
    """Return the number of what `describe_start` wrote for one that JSON lacks."""
    return float(found[NOT_FINITE]) if found.keys() == {NOT_FINITE} else found
