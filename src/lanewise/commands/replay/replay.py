"""Takes steps of a run again, in processes of their own, without writing to the run."""

import json
import logging
import shlex
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

from lanewise.commands.jobs.job import Job
from lanewise.commands.recording.comparison import Recording
from lanewise.commands.recording.recorder import StepRecorder
from lanewise.commands.replay.plan import OF_STEPS, ReplayPlan
from lanewise.commands.replay.sources import changed_sources
from lanewise.data import LaneBatch
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run, build_task
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.run import Run
from lanewise.engine.step.metrics import StepReport
from lanewise.errors import CheckpointError
from lanewise.launch.scratch import scratch_folder
from lanewise.processes.device.determinism import exact_pins
from lanewise.processes.world.digests import gather_digests
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver
from lanewise.runs.file import dump_json


@final
class Replay:
    """A run on its way to a step that it took before. It evaluates and saves nothing, and has no callbacks.

    Collective: every rank must make it, and call its methods alike.

    Args:
        plan: from where, and to which step.
        world: the processes.
        folder: a temporary one, the same on every rank.

    Raises:
        CheckpointError: if what equal bytes depend on differs here, or a checkpoint does not fit.
    """

    def __init__(self, plan: ReplayPlan, world: World, folder: Path) -> None:
        self.plan, self._world = plan, world
        self.num_taken = plan.num_taken
        """How many steps were taken, as the run counts them."""
        self._report: StepReport | None = None
        """Of the last step, until `enter`."""
        self._between = CheckpointFolder(folder / "between")
        self._segments = iter(plan.segments)
        self._require_pins()
        saved = CheckpointFolder(plan.run_dir.checkpoints, plan.num_taken) if plan.num_taken else None
        self.engine = self._begin(saved)
        """Has taken `num_taken` steps."""
        self.changed_sources = changed_sources(plan, self.engine.run.runner.task)
        """See `changed_sources`."""

    def _require_pins(self) -> None:
        """Compare what equal bytes depend on besides the configuration, as a resume does."""
        now, there = exact_pins(self._world.device), self.plan.start.get("versions", {})
        known = {"torch", "cpu_capability", "gpu", "tf32"} & (now.keys() | there.keys())
        known |= {"onednn"} & there.keys()  # which runs of 0.2.0 lack
        names = [name for name in sorted(known) if there.get(name) != now.get(name)]
        if names and self.plan.is_exact:
            differing = (f"{name} was {there.get(name)}, and is {now.get(name)} here" for name in names)
            path = self.plan.run_dir.path
            command = f"lanewise replay {shlex.quote(str(path))} --step {self.plan.step} --allow exact"
            raise CheckpointError(
                f"equal bytes of {path} depend on what differs: {'; '.join(differing)}. Run this command "
                f"where that is alike. {command} takes the step all the same, and compares no bytes."
            )

    def _begin(self, saved: CheckpointFolder | None) -> Engine:
        """Begin the next segment, from a checkpoint or from the seed. Collective."""
        self._segment = segment = next(self._segments)
        plan, config = self.plan, segment.config
        task = build_task(config, plan.task)
        run = build_run(config, self._world, task, is_restored=saved is not None)
        allow = (*segment.allow, *plan.allow)
        now, there = run.loader.identity, plan.start.get("dataset")
        if saved is None and len(plan.segments) == 1 and there not in (None, now):  # else a checkpoint tells
            raise CheckpointError(
                f"{plan.run_dir.path} read other data, {there}, and this is {now}. Restore it."
            )
        if (0 if saved is None else resume_run(run, saved, allow)) != self.num_taken:
            raise CheckpointError(
                f"the checkpoint of step {self.num_taken} was removed meanwhile. Try again."
            )
        if segment.last_step == plan.step:  # the step gets a line of metrics, with its norm
            run = replace(run, log_interval=run.log_interval.until(plan.step))
        self.batches = run.loader.batches(self.num_taken, segment.last_step)
        """What this process reads next."""
        if run.evaluation is not None and run.evaluation.is_due:  # a signal came before this evaluation
            self._evaluate(run, self.num_taken - 1)
        return Engine(run, first_step=self.num_taken)

    def close(self) -> None:
        """Stop the background work."""
        self.engine.close()

    def take(self) -> StepReport:
        """Take the next step. Collective.

        Raises:
            CheckpointError: if the data ended before it.
        """
        self.enter()
        self._report = report = self.engine.take_step(self.num_taken, self.batches)
        self.num_taken += 1
        return report

    def record(self, batches: Iterator[LaneBatch] | None = None) -> Recording:
        """Take the next step, and record it with the state after it, and its line of metrics. Collective.

        Args:
            batches: those of the step, where they were read already.
        """
        self.enter()
        recorder = StepRecorder(self.engine, self._world)
        recording, report = recorder.take(self.num_taken, batches or self.batches)
        self._report = report
        self.num_taken += 1
        found = {
            **recording,
            "totals": {"loss": report.totals.loss, "weight": report.totals.weight},
            "metrics": self.columns(report),
            "digests": self.digests(),
            "evaluation": self.finish(compares=True),
        }
        return {part: values for part, values in found.items() if values}

    def observe(self, observed: Collection[int]) -> tuple[dict[int, Recording], list[str]]:
        """Take the steps up to the last one; return what a `ReplayJob` does. Collective."""
        taken: dict[int, Recording] = {}
        while self.num_taken < self.plan.step:
            if self.num_taken + 1 in observed:
                recording = self.record()
                taken[self.num_taken] = recording
            else:
                self.take()
        return taken, self.changed_sources

    def advance(self) -> None:
        """Take the steps before the last one, and be ready for that. Collective."""
        while self.num_taken < self.plan.step - 1:
            self.take()
        self.enter()

    def enter(self) -> None:
        """Do what the run did after the last step, and the next one depends on. Collective.

        Raises:
            CheckpointError: if there is no next one.
        """
        run = self.engine.run
        if run.loader.is_over:
            raise CheckpointError(f"the run has {self.num_taken} steps. Name one of them.")
        self.finish()
        if self.num_taken == self._segment.last_step < self.plan.step:
            # A start of the run went on from here, with other options.
            saver = Saver(self._between, self._world, keep_last=1, keep_best=0, sign=1)
            saver.save(run.state.take(), Manifest(self.num_taken, None, run.identity, ()))
            saver.finish()
            self.engine.close()
            self.engine = self._begin(self._between)

    def finish(self, *, compares: bool = False) -> Mapping[str, float | None]:
        """Do what the run did after the last step, unless that is done. Collective.

        Args:
            compares: whether to evaluate where the run did, also if nothing depends on it.

        Returns:
            The values of that evaluation; empty where there was none.
        """
        run, report, self._report = self.engine.run, self._report, None
        if report is None or run.evaluation is None:
            return {}
        end = run.loader.end_of(report.step)
        ends_run = "evaluation" in self.plan.written.get(report.step + 1, {})
        run.evaluation.note_step(report.step, report.totals, end, ends_run=ends_run)
        if not run.evaluation.is_due:
            return {}
        self._evaluate(run, report.step, compares=compares)
        return _as_written(run.evaluation.last_values)

    def _evaluate(self, run: Run, step: int, *, compares: bool = False) -> None:
        """Evaluate, or take over what the run wrote where nothing else is needed. Collective."""
        assert run.evaluation is not None
        values = self.plan.written.get(step + 1, {}).get("evaluation", {})
        known = {name: value for name, value in values.items() if value is not None}
        if compares or (run.plateau is not None and run.evaluation.config.best not in known):
            run.enter_weights(step)
            with run.evaluation_weights():
                run.evaluation.run()
        else:
            run.evaluation.take_over(known)
        if run.plateau is not None and run.evaluation.last_value is not None:
            run.plateau.after_evaluation(step, run.evaluation.last_value)

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor of the state after the last step. Collective."""
        return gather_digests(self.engine.run.state.take(), self._world, self.num_taken)

    def columns(self, report: StepReport) -> Mapping[str, Any]:
        """Return the numbers of the line of metrics of a step, without its times; empty where it has none."""
        if report.interval is None:
            return {}
        columns, largest = report.interval.columns(1, self._world.device), report.interval.totals.largest
        found: dict[str, Any] = {name: v for name, v in columns.items() if name.startswith(OF_STEPS)}
        if largest is not None:
            found["largest_loss"] = largest._replace(step=largest.step + 1)._asdict()
        return _as_written(found)


def _as_written(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers as they are in a line of JSON: one that is not finite is None."""
    read: dict[str, Any] = json.loads(dump_json(columns))
    return read


@dataclass(frozen=True, kw_only=True)
class PlannedJob(Job):
    """Does something on the way to the step of a plan, in processes of its own."""

    plan: ReplayPlan
    folder: Path
    """A temporary one."""

    @classmethod
    @contextmanager
    def of(cls, plan: ReplayPlan, **given: Any) -> Iterator[Self]:
        """Make the job of a plan, with a temporary folder that is removed at the end of the block."""
        with scratch_folder() as folder:
            yield cls(plan.config, plan.task, untrusted=plan.untrusted, plan=plan, folder=folder, **given)

    def run(self, world: World) -> Any:
        logging.getLogger().setLevel(logging.ERROR)  # of what the run told already
        with closing(Replay(self.plan, world, self.folder)) as replay:
            return self.follow(replay, world)

    @abstractmethod
    def follow(self, replay: Replay, world: World) -> Any:
        """Take its steps. Collective: every rank must call this. What rank 0 returns is the result."""


@final
@dataclass(frozen=True, kw_only=True)
class ReplayJob(PlannedJob):
    """Takes the steps of a plan again; the result is what `compare_steps` takes.

    That is the recording of each step that is observed, and what `changed_sources` says. Besides the parts of
    a `StepRecorder` a recording has `totals`, the loss and the weight of the step, and those of
    `read_written`: no `metrics` where the step has no line, no `evaluation` where there was none.
    """

    observed: Collection[int]
    """Steps, from 1."""

    def follow(self, replay: Replay, world: World) -> Any:
        return replay.observe(self.observed)
