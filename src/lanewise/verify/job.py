"""What verification runs on one layout: the probes, a few steps in `exact`, and the same in `close`."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanewise.checkpoint import CheckpointFolder, Manifest, Saver
from lanewise.data import LaneReader
from lanewise.engine import build_engine, resume
from lanewise.engine.build import count_samples
from lanewise.engine.engine import Engine
from lanewise.engine.evaluate import EvalSet, Evaluator
from lanewise.errors import LanewiseError, describe
from lanewise.jobs.job import Job
from lanewise.lanes import BlockSchedule
from lanewise.verify.bound import CloseResult, judge, write_reference
from lanewise.verify.cut import CutProbe, UnmergedMetric, probe_cut, probe_metrics
from lanewise.verify.hidden import hidden_state
from lanewise.verify.probe import Probe, Subject, probe
from lanewise.verify.trace import Trace, choose_steps, run_steps

if TYPE_CHECKING:
    from lanewise.world.world import World


@dataclass
class Result:
    """What one process found."""

    probe: Probe | None = None
    trace: Trace | None = None
    """None where the steps were not run, or failed on every rank."""
    error: str = ""
    """Why they failed."""
    close: CloseResult | None = None
    cut: CutProbe | None = None
    unmerged_metrics: list[UnmergedMetric] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class VerifyJob(Job):
    """Runs a few steps and notes everything; the result is one `Result` for each rank.

    The configuration must say `exact`.
    """

    folder: Path
    """Temporary; for logs, checkpoints and what layouts are compared with."""
    name: str
    """Of this layout, for its files."""
    num_steps: int
    judges_close: bool
    """Whether the bound of `close` is checked as well."""
    is_reference: bool = False
    """Whether the others are compared with this one: then it looks at what needs one process only."""

    def log_file(self, rank: int) -> Path:
        """See `Job`."""
        return self.folder / f"{self.name}-{rank}.log"

    def run(self, world: "World") -> Any:
        """See `Job`."""
        logging.getLogger().setLevel(logging.ERROR)
        own = probe(self.config, world.device, is_reference=self.is_reference)
        result = Result(own)
        if world.world_size == 1 or not own.passes.collectives:
            try:
                result.trace = self._trace(world)
                if self.judges_close:
                    result.close = self._judge_close(world)
            except LanewiseError as error:  # on every rank alike; from a single one it would end the job
                result.error = describe(error)
        if self.is_reference:
            batch = self.config.batch
            # In 16 bits the rounding of a forward would look like an influence of the cut.
            precise = replace(self.config, precision="float32")
            result.cut = probe_cut(Subject(precise, world.device), own.passes.changed_buffers)
            result.unmerged_metrics = probe_metrics(
                Subject(self.config, world.device), batch.micro_batch_size, batch.global_batch_size
            )
        return world.gather_object(result)

    def _trace(self, world: "World") -> Trace:
        """Take the steps, and save a checkpoint half-way for another layout to go on from."""
        engine = build_engine(self.config, world)
        steps = choose_steps(engine.schedule, self.num_steps, engine.last_step)
        half = len(steps) // 2
        trace = Trace()
        try:
            for step in run_steps(engine, world, steps):
                trace.steps.append(step)
                if len(trace.steps) == half:
                    folder = CheckpointFolder(self.checkpoints(self.name))
                    saver = Saver(folder, world, keep_last=1, keep_best=0, sign=1)
                    saver.save(engine.state.take(), Manifest(steps[half], None, engine.identity, ()))
                    saver.finish()
            self.finish_trace(trace, engine, world)
        finally:
            engine.passes.close()
        return trace

    def checkpoints(self, name: str) -> Path:
        """Return where a layout saves."""
        return self.folder / f"checkpoints-{name}"

    def finish_trace(self, trace: Trace, engine: Engine, world: "World") -> None:
        """Evaluate at most a global batch of each eval dataset; of the training data where there is none."""
        training, batch, seed = engine.training, self.config.batch, self.config.train.seed
        task = training.task
        sets = []
        for name, dataset in (task.eval_datasets() or {"training data": task.train_dataset()}).items():
            num_samples = min(count_samples(dataset), batch.global_batch_size)
            schedule = BlockSchedule(num_samples, batch.num_lanes, batch.micro_batch_size)
            sets.append(EvalSet(name, LaneReader(dataset, task.collate, seed), schedule))
        evaluator = Evaluator(task, training.evaluated_model, training.precision, sets, world, seed=seed)
        trace.evaluation = evaluator.run()
        trace.hidden = hidden_state(
            training.model, task=task, optimizer=training.optimizer, scheduler=training.scheduler
        )

    def _judge_close(self, world: "World") -> CloseResult:
        """Compare the gradients of `close` with those of one process."""
        distributed = replace(self.config.distributed, equality="close")
        config = replace(self.config, distributed=distributed)
        engine = build_engine(config, world)
        steps = choose_steps(engine.schedule, self.num_steps, engine.last_step)
        try:
            if self.is_reference:
                write_reference(self.folder, engine, world, steps)
                return CloseResult()
            return judge(self.folder, engine, world, steps, config.batch.num_lanes)
        finally:
            engine.passes.close()


@dataclass(frozen=True, kw_only=True)
class ResumeJob(VerifyJob):
    """Goes on from the checkpoint of another layout, and takes the other half of the steps."""

    resumes: str
    """Name of the layout whose checkpoint it is."""

    def run(self, world: "World") -> Any:
        """See `Job`."""
        logging.getLogger().setLevel(logging.ERROR)
        result = Result()
        try:
            engine = build_engine(self.config, world)
            steps = choose_steps(engine.schedule, self.num_steps, engine.last_step)
            resume(engine, CheckpointFolder(self.checkpoints(self.resumes)), world, allow=())
            try:
                result.trace = Trace(list(run_steps(engine, world, steps[len(steps) // 2 :])))
                self.finish_trace(result.trace, engine, world)
            finally:
                engine.passes.close()
        except LanewiseError as error:
            result.error = describe(error)
        return world.gather_object(result)
