"""Runs the probes on one layout, then a few steps in `exact`, and the same steps in `close`."""

import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from lanewise.commands.jobs.job import Job
from lanewise.commands.recording.recorder import tensor_digests
from lanewise.commands.verify.bound import CloseResult, judge, write_reference
from lanewise.commands.verify.cut import CutProbe, probe_cut
from lanewise.commands.verify.hidden import changed, hidden_state
from lanewise.commands.verify.metric import MetricProbe, probe_metrics
from lanewise.commands.verify.probe import Probe, begin_with, probe
from lanewise.commands.verify.probed_run import ProbedRun, evaluate_batch
from lanewise.commands.verify.trace import BUFFER, Trace, run_steps, run_twice, steps_of
from lanewise.commands.verify.update import Updates, probe_updates
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.run.build import build_run, build_task
from lanewise.engine.run.resume import resume_run
from lanewise.engine.step.update import Training
from lanewise.errors import CheckpointError, LanewiseError, WorldError, describe
from lanewise.processes.world.world import World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver
from lanewise.task import Task

_SECONDS_AFTER_AN_ERROR = 20.0
_SECONDS_WITHOUT_ONE = 600.0


@dataclass
class RankResult:
    """What one process found."""

    probe: Probe | None = None
    trace: Trace = field(default_factory=Trace)
    """What the steps computed; it has none where they were not run, or failed on every rank."""
    error: str = ""
    """Why the steps failed."""
    close: CloseResult | None = None
    updates: Updates = field(default_factory=Updates)
    cut: CutProbe = field(default_factory=CutProbe)
    metrics: MetricProbe = field(default_factory=MetricProbe)


@final
@dataclass(frozen=True, kw_only=True)
class VerifyJob(Job):
    """Runs the probes and a few steps; the result is one `RankResult` for each rank.

    The configuration must say `exact`.
    """

    folder: Path
    """A temporary folder for logs, checkpoints and the values that layouts are compared with."""
    name: str
    """Name of this layout, for its files."""
    num_steps: int
    judges_close: bool
    """Whether the bound of `close` is checked as well."""
    first_lane: int = 0
    """The lane for which rank 0 compiles first; each further rank begins with the next lane."""
    is_reference: bool = False
    """Whether the others are compared with this one, which also runs the probes that need one process."""
    is_repeat: bool = False
    """Whether this one repeats the reference, and reads samples in another order."""
    resume_from: str | None = None
    """Name of a layout: then this job runs no probes, and goes on from the checkpoint of that layout."""

    @property
    def variables(self) -> dict[str, str]:
        """In the repeat sets have another order, even where the environment fixes one."""
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        return super().variables | ({"PYTHONHASHSEED": seed} if self.is_repeat else {})

    def log_file(self, rank: int) -> Path:
        return self.folder / f"{self.name}-{rank}.log"

    def run(self, world: World) -> Any:
        logging.getLogger().setLevel(logging.ERROR)
        result = RankResult()
        if self.resume_from is None:
            self._verify(world, result)
        else:
            with _failing_together(world, result):
                self._trace(world, result)
        self._result_file(world.rank).write_bytes(pickle.dumps(result))
        world.all_gather_tree(None)  # all have written theirs
        if world.rank > 0:
            return None
        files = map(self._result_file, range(world.world_size))
        return [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - from our parent's folder

    def _verify(self, world: World, result: RankResult) -> None:
        """Run the probes, and the steps unless the probes found what training refuses."""
        probed = ProbedRun(self.config, world.device, self.task)
        found = probe(self.config, probed, is_reference=self.is_reference, is_repeat=self.is_repeat)
        result.probe = found
        is_communicating = world.world_size > 1 and found.passes.collectives
        needs_equal = type(probed.task).loss_method() != "loss"  # a loss of all samples runs a forward twice
        is_refused = bool(is_communicating or found.passes.changed_parameters)
        is_refused |= needs_equal and found.passes.are_unequal
        if not any(world.all_gather_tree(is_refused)):  # a rank alone would wait for the others
            with _failing_together(world, result):
                lane = (self.first_lane + world.rank) % self.config.batch.num_lanes
                begin_with(probed, lane, self.folder / f"compiled-{self.name}-{world.rank}")
                self._trace(world, result)
                if self.judges_close:
                    result.close = self._judge_close(world)
        if self.is_reference:
            # In 16 bits the rounding of a forward would look like an influence of the cut.
            precise = replace(self.config, precision="float32")
            of_cut = ProbedRun(precise, world.device, self.task, data_of=probed)
            result.cut = probe_cut(of_cut, found.passes.changed_buffers)
            of_metrics = ProbedRun(self.config, world.device, self.task, data_of=probed)
            result.metrics = probe_metrics(of_metrics, self.config.batch)

    def _trace(self, world: World, result: RankResult) -> None:
        """Take the steps, or their second half from the checkpoint that another layout saved half-way."""
        run = build_run(self.config, world, build_task(self.config, self.task))
        training, task = run.training, run.runner.task
        steps = steps_of(run.loader, self.num_steps, run.last_step)
        half = len(steps) // 2
        trace = Trace()
        with closing(run.reducer):
            if self.resume_from is not None:
                first = resume_run(run, self._checkpoints(self.resume_from), allow=())
                if half == 0 or first != steps[half]:
                    raise CheckpointError(f"the run takes {len(steps)} steps: too few to stop in between.")
                steps = steps[half:]
                trace.at_checkpoint = self._state_of(training, task)
            otherwise: dict[str, list[str]] = {}
            engine = Engine(replace(run, training=run_twice(training, otherwise)))
            hidden = hidden_state(training.model, task=task)
            for step, recording in run_steps(engine, world, steps):
                trace.steps[step] = {**recording, "otherwise": {**otherwise}}
                otherwise.clear()
                if self.resume_from is None and len(trace.steps) == half:
                    # A run evaluates between its steps, which may depend on what that changes.
                    self._evaluate(engine, world)
                    saver = Saver(self._checkpoints(self.name), world, keep_last=1, keep_best=0, sign=1)
                    saver.save(engine.run.state.take(), Manifest(steps[half], None, engine.run.identity, ()))
                    saver.finish()
                    trace.at_checkpoint = self._state_of(training, task)
            if trace.steps:
                trace.steps[max(trace.steps)]["evaluation"] = self._evaluate_at_end(engine, world)
            trace.hidden = self._hidden(training, task)
            trace.changed = changed(hidden, hidden_state(training.model, task=task))
            if self.is_reference:
                result.updates = probe_updates(training)
        result.trace = trace

    def _result_file(self, rank: int) -> Path:
        """Return where a rank leaves its result, which is more than tensors and numbers."""
        return self.folder / f"result-{self.name}-{rank}"

    def _checkpoints(self, name: str) -> CheckpointFolder:
        """Return where a layout saves."""
        return CheckpointFolder(self.folder / f"checkpoints-{name}")

    def _evaluate_at_end(self, engine: Engine, world: World) -> dict[str, float]:
        """Evaluate, without eval datasets on the training data, where the reference can."""
        no_loss = self.folder / "no-loss"
        if engine.run.evaluation is not None or no_loss.exists():
            return self._evaluate(engine, world)
        try:
            return self._evaluate(engine, world, {"training data": engine.run.loader.reader.dataset})
        except Exception:  # a task need not have a loss in evaluation mode if it never evaluates
            if not self.is_reference:
                raise
            no_loss.touch()
            return {}

    def _hidden(self, training: Training, task: Task) -> dict[str, str]:
        """Return the digests of all values outside of parameters and buffers."""
        optimizer, scheduler = training.optimizer, training.scheduler
        return hidden_state(training.model, task=task, optimizer=optimizer, scheduler=scheduler)

    def _state_of(self, training: Training, task: Task) -> dict[str, str]:
        """Return the digests of buffers and of such values; others may differ because of the first ones."""
        buffers = tensor_digests((f"{BUFFER}{name}", one) for name, one in training.model.named_buffers())
        return buffers | self._hidden(training, task)

    def _evaluate(
        self, engine: Engine, world: World, others: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Evaluate on the eval datasets, or on others, whose batches metrics may not take."""
        lanes, model = engine.run.runner, engine.training.evaluated_model
        datasets = others or (engine.run.evaluation.datasets if engine.run.evaluation else {})
        engine.run.enter_weights(-1)  # equal on all ranks, also where one had no samples
        with engine.run.evaluation_weights():
            return evaluate_batch(
                lanes, model, datasets, world, self.config, engine.reducer, has_metrics=others is None
            )

    def _judge_close(self, world: World) -> CloseResult:
        """Compare the gradients of `close` with those of one process."""
        distributed = replace(self.config.distributed, equality="close")
        train = replace(self.config.train, max_grad_norm=None)  # the bound is that of a gradient as it is
        config = replace(self.config, distributed=distributed, train=train)
        with closing(build_engine(config, world, build_task(config, self.task))) as engine:
            steps = steps_of(engine.run.loader, self.num_steps, engine.run.last_step)
            if self.is_reference:
                write_reference(self.folder, engine, world, steps)
                return CloseResult()
            return judge(self.folder, engine, world, steps)


@contextmanager
def _failing_together(world: World, result: RankResult) -> Iterator[None]:
    """Note an error that all ranks have. An error that only some ranks have ends the job.

    Ranks may be waiting in a collective for one that failed alone, so they tell each other through the store.
    """
    failure: LanewiseError | None = None
    try:
        yield
    except LanewiseError as error:
        if world.world_size == 1:
            raise
        failure = error
        result.error = describe(error)
    world.tell("verify", "failed" if failure else "done")
    seconds = _SECONDS_AFTER_AN_ERROR if failure else _SECONDS_WITHOUT_ONE
    try:
        told = world.hear("verify", range(world.world_size), seconds)
    except WorldError as error:
        raise failure or error from None
    if failure is not None and "done" in told:
        raise failure
