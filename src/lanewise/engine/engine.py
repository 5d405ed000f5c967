"""The loop: takes steps, evaluates, shows observers what happened, and writes the model at the end."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import final

from lanewise.config import RunConfig
from lanewise.config.optimizer_rules import needs_closure
from lanewise.data import LaneBatch
from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.buffers.pack import find_places
from lanewise.engine.observers import Observers, ShownModel, digested
from lanewise.engine.profiler import profiled
from lanewise.engine.run.build import build_run
from lanewise.engine.run.run import Run
from lanewise.engine.run.saving import Saving
from lanewise.engine.samples.epoch_reads import EpochReads
from lanewise.engine.step.build import build_pass
from lanewise.engine.step.closure import ClosureStep
from lanewise.engine.step.lanes import LaneLosses, OwnLosses, TaskLane
from lanewise.engine.step.metrics import IntervalReport, StepMetrics, StepReport
from lanewise.engine.step.several_losses import SeveralLosses
from lanewise.engine.step.shared import SharedLoss
from lanewise.engine.step.step import TrainStep
from lanewise.engine.step.whole_loss import task_loss
from lanewise.engine.step.wire import Spread, Votes
from lanewise.engine.transforms import CompilationLog
from lanewise.errors import ConfigError, PreemptedError, noting
from lanewise.lanes import own_progress
from lanewise.processes.device.accelerator import device_name, has_streams
from lanewise.processes.device.peak import peak_flops_per_second
from lanewise.processes.watch.heartbeat import CALLBACK, EVALUATION, SAVE, heartbeat
from lanewise.processes.world.world import World
from lanewise.runs.callback import Callback, RunStart
from lanewise.runs.checkpoint.model_file import save_model
from lanewise.runs.dir import RunDir
from lanewise.runs.loggers import PhaseLog
from lanewise.task import Task

logger = logging.getLogger(__name__)


@final
class Engine:
    """Trains a model over a fixed number of steps.

    Collective: every rank must build it and call `fit`.

    Args:
        run: the parts of the run; where it resumes, already restored from its checkpoint.
        first_step: the step with which training begins; greater than 0 where the run resumes.
        saving: saves checkpoints; None: no checkpoints are saved.
        record: yields the batches of this process unchanged, and may record them.
    """

    def __init__(
        self,
        run: Run,
        *,
        first_step: int = 0,
        saving: Saving | None = None,
        record: Callable[[Iterator[LaneBatch]], Iterator[LaneBatch]] = lambda batches: batches,
    ) -> None:
        self.run = run
        self.training = run.training
        self.evaluation = run.evaluation
        self.reducer = run.reducer
        self.first_step = self.next_step = first_step
        self._saving = saving
        self.stop_reason: str | None = None
        """Why a callback wanted the run to end, on the rank that has the callbacks; None where none did."""
        self._is_ended_by_callback = False
        self._num_before = self._num_logged = run.loader.num_samples_after(first_step - 1)
        """Samples of all lanes before this start, and up to the last logged step."""
        self._record = record
        reader = run.loader.reader
        self._reads = EpochReads(run.world, reader.total_bytes, skips=reader.missing == "skip")
        config, runner, replicas = run.config, run.runner, run.reducer.replicas
        loss_scale = runner.precision.loss_scale
        self._compilations = None if config.compile is None else CompilationLog()
        step_state = [find_places(replica, runner.task.step_state) for replica in replicas]
        self._pass = build_pass(
            run.reducer,
            Spread(run.world, run.placement, config.distributed.equality),
            run.phases,
            LaneBuffers([[replica] for replica in replicas], run.world, run.placement, step_state),
            loss_scale=loss_scale,
            task=runner.task,
            log=run.log_interval,
            vote=Votes if saving is None else saving.vote,
        )
        metrics = StepMetrics(
            run.log_interval, run.phases, run.training.model, loss_scale, with_norms=config.log.gradients
        )
        self.step = TrainStep(self._pass, self._choose_losses(), runner, run.training, metrics)
        takes_closure = needs_closure(type(run.training.optimizer), is_asked=run.training.closure)
        self.take_step = ClosureStep(self.step).run if takes_closure else self.step.run
        """Takes a step, of which it gets the number and the batches of this process. Collective."""

    def _choose_losses(self) -> LaneLosses:
        runner = self.run.runner
        if runner.loss_method != "loss":
            return SharedLoss(self._pass, runner.seed, task_loss(runner))
        if runner.has_several_losses:
            return SeveralLosses(self._pass, runner)
        return OwnLosses(partial(TaskLane, runner))

    def fit(self, run_dir: RunDir, callbacks: Sequence[Callback] = (), run_id: str = "") -> dict[str, float]:
        """Train, and write the model to the run directory.

        Args:
            run_dir: where rank 0 writes the trained model, and the best one so far.
            callbacks: observe the run on rank 0.
            run_id: what they are told.

        Returns:
            The values of the last evaluation; empty where the task has no eval datasets.

        Raises:
            TaskError: if the task breaks its contract.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
            CheckpointError: if a checkpoint could not be saved.
            PreemptedError: if a signal stopped the run.
        """
        world, num_behind = self.run.world, 1 if has_streams(self.run.world.device) else 0
        phases = PhaseLog(run_dir.phases, world.rank, world.world_size, after_step=self.first_step)

        def write_times(report: IntervalReport) -> None:
            phases.write(report.step + 1, report.own_columns(self._num_own_steps(report), world.device))

        observers = Observers(
            callbacks if world.rank == 0 else (), write_times, self._name_metrics, num_behind
        )
        begin = time.perf_counter()
        start = RunStart(run_dir.path, run_id, self.run.config, self.first_step + 1, self.run.last_step)
        with closing(phases), observers.observing(start), own_progress():
            shown = ShownModel(self.run, observers)
            if self.evaluation is not None and self.evaluation.is_due:  # a signal came before this evaluation
                self._evaluate(self.first_step - 1, run_dir, observers)
            shown.show(self.first_step - 1, to_all=True)
            if self._saving is not None:
                self._saving.stop_reason = observers.stop_reason
            steps = digested(self.steps(), self.run, observers, self.ends_with)
            for report in profiled(steps, self.run, run_dir.profile, self.first_step):
                stops = report.totals.votes.stop
                self._is_ended_by_callback = report.totals.votes.end and not stops  # a signal comes first
                end, ends_run = self.run.loader.end_of(report.step), self.ends_with(report.step)
                saving, saves = self._saving, report.totals.votes.save
                saves |= saving is not None and saving.is_due_after(report.step, end, ends_run=ends_run)
                observers.show(report.interval)
                if self._compilations is not None and report.interval is not None:
                    self._compilations.tell()
                if end.ends_epoch or ends_run:
                    self._show_epoch(end.epoch, report.step, observers)
                if self.evaluation is not None:
                    self.evaluation.note_step(report.step, report.totals, end, ends_run=ends_run)
                if self.evaluation is not None and self.evaluation.is_due and not stops:
                    stops = self._evaluate_or_stop(report.step, run_dir, observers)
                if shown.every and not stops:
                    shown.show(report.step, to_all=ends_run or self._ends_early)
                if saves or stops or self._ends_early:
                    self._save(report.step, observers, stops=stops)
            observers.catch_up()
            self.stop_reason = observers.stop_reason()
            self._finish(run_dir)
        if self.run.world.rank == 0:
            self._describe_end(self.next_step, time.perf_counter() - begin)
            self._name_models(run_dir)
        return {} if self.evaluation is None else self.evaluation.last_values

    def steps(self) -> Iterator[StepReport]:
        """Take one step after the other, to the last one or until an evaluation or a callback ends the run.

        Collective: every rank must take every step.
        """
        batches = self._reads.count(self.run.loader.batches(self.first_step, self.run.last_step))
        batches = self._record(batches)
        try:
            run, step = self.run, self.first_step
            last_step = math.inf if run.last_step is None else run.last_step
            while step < last_step and not (run.loader.is_over or self._ends_early):
                report = self.take_step(step, batches)
                self.next_step = step = step + 1
                yield report if report.interval is None else self._count_samples(report, report.interval)
            self._pass.buffers.check()
        finally:
            self.close()

    @property
    def _ends_early(self) -> bool:
        """Whether a callback or an evaluation ended the run; the same on every rank."""
        return self._is_ended_by_callback or (self.evaluation is not None and self.evaluation.ends_run)

    def ends_with(self, step: int) -> bool:
        """Tell whether the run ends with a step, the last one that was taken."""
        return step + 1 == self.run.last_step or self.run.loader.is_over

    def _count_samples(self, report: StepReport, interval: IntervalReport) -> StepReport:
        """Complete the report of a logged step."""
        before, self._num_logged = self._num_logged, self.run.loader.num_samples_after(report.step)
        return report._replace(interval=replace(interval, num_samples=self._num_logged - before))

    def close(self) -> None:
        """Stop the background work of the reducer."""
        self.reducer.close()

    def _show_epoch(self, epoch: int, step: int, observers: Observers) -> None:
        """Show what the epoch read and left out. Collective where `EpochReads` counts."""
        if values := self._reads.take(epoch):
            observers.catch_up()
            observers.show_epoch(epoch, step, values)

    def _evaluate_or_stop(self, step: int, run_dir: RunDir, observers: Observers) -> bool:
        """Evaluate; return whether a signal stopped the evaluation. Collective.

        A stopped evaluation is repeated when the run resumes.
        """
        try:
            self._evaluate(step, run_dir, observers)
        except PreemptedError:
            return True
        except ConfigError as error:  # a name in `evaluate` is wrong: only now are a metric's values known
            if self._saving is None:
                raise
            self._pass.buffers.check()
            self._saving.save(step, None, stops=False)
            self._saving.finish()
            raise ConfigError(f"{error} The run was saved: correct it, and continue with --resume.") from None
        return False

    def _evaluate(self, step: int, run_dir: RunDir, observers: Observers) -> None:
        """Evaluate, and keep the best model. Collective."""
        assert self.evaluation is not None
        observers.catch_up()
        heartbeat.note = (EVALUATION, step, None)
        self.run.enter_weights(step)
        with self.run.evaluation_weights():
            with noting(lambda: f"in the evaluation after step {step + 1}"):
                wants_stop = self._saving.wants_stop if self._saving is not None else lambda: False
                values, is_best = self.evaluation.run(wants_stop)
            if is_best:
                self.evaluation.best_step = step + 1
                heartbeat.note = (SAVE, step, None)
                save_model(self.training.evaluated_model, run_dir.best_model, self.run.world.rank)
        plateau, value = self.run.plateau, self.evaluation.last_value
        if plateau is not None and value is not None:
            plateau.after_evaluation(step, value)
        heartbeat.note = (CALLBACK, step, None)
        epoch = self.run.loader.end_of(step).epoch
        observers.show_evaluation(epoch, step, values)
        if is_best:
            observers.show_best(epoch, step, run_dir.best_model)

    def _save(self, step: int, observers: Observers, *, stops: bool) -> None:
        """Save a checkpoint, and raise PreemptedError where a signal stops the run. Collective."""
        observers.catch_up()
        if self._saving is None:
            return
        heartbeat.note = (SAVE, step, None)
        self._pass.buffers.check()
        is_evaluated = self.evaluation is None or not self.evaluation.is_due
        metric = None if self.evaluation is None else self.evaluation.last_value
        # After the last step only an evaluation can be left to do; without one the run is done, not stopped.
        is_done = is_evaluated and (self.ends_with(step) or self._ends_early)
        self._saving.save(step, metric, stops=stops and not is_done)

    def _finish(self, run_dir: RunDir) -> None:
        """Wait for the last save; write the model, and its average if there is one. Collective."""
        if self._saving is not None:
            self._saving.finish()
        heartbeat.note = (SAVE, heartbeat.step, None)
        with self.run.evaluation_weights():
            save_model(self.training.model, run_dir.model, self.run.world.rank)
        if self.training.average is not None:
            save_model(self.training.average.module, run_dir.averaged_model, self.run.world.rank)

    def _describe_end(self, end: int, seconds: float) -> None:
        """Log how many steps and samples were trained before step `end`, in how many seconds."""
        if not self.ends_with(end - 1):
            stopping = None if self.evaluation is None else self.evaluation.early_stopping
            why = f"a callback stopped it: {self.stop_reason}"
            if stopping is not None and not self._is_ended_by_callback:
                why = stopping.describe()
            of = "" if self.run.last_step is None else f" of {self.run.last_step:,}"
            logger.info("the run ends after %s%s steps (%s)", f"{end:,}", of, why)
        num_steps = end - self.first_step
        if not num_steps:
            key = "max_steps" if self.run.config.train.max_steps == end else "epochs"
            remedy = f", up to train.{key}. Raise it to continue" if self.ends_with(end - 1) else ""
            logger.info("nothing was left to train: all %s steps were taken before%s", f"{end:,}", remedy)
            return
        num_samples = self.run.loader.num_samples_after(end - 1) - self._num_before
        num_samples -= self._reads.num_skipped_by_all
        logger.info(
            "trained %s steps on %s samples in %.1f s: %s samples/s over all processes",
            f"{num_steps:,}",
            f"{num_samples:,}",
            seconds,
            f"{num_samples / seconds:,.0f}",
        )

    def _name_models(self, run_dir: RunDir) -> None:
        """Log where the models are, of which step, and what was evaluated of them."""
        logger.info("model after step %d: %s", self.next_step, run_dir.model)
        if self.training.average is not None:
            logger.info("average of its weights, which is evaluated: %s", run_dir.averaged_model)
        if self.evaluation is not None and self.evaluation.best is not None:
            (step, value), config = self.evaluation.best, self.run.config.evaluate
            which = "lowest" if config.best_mode == "min" else "highest"
            logger.info(
                "best after step %d, %s %s %.6g: %s", step, which, config.best, value, run_dir.best_model
            )

    def _name_metrics(self, report: IntervalReport) -> Mapping[str, float]:
        columns = report.columns(self._num_own_steps(report), self.run.world.device)
        return {**columns, **self._name_flops(columns["perf/samples_per_second"])}

    def _name_flops(self, samples_per_second: float) -> Mapping[str, float]:
        """Return what a device computes in a second, and what part that is of its peak, where it is known."""
        run, config = self.run, self.run.config
        if config.log.flops_per_sample is None:
            return {}
        num_devices = run.world.world_size * len(run.reducer.replicas)
        flops = config.log.flops_per_sample * samples_per_second / num_devices
        peak = peak_flops_per_second(device_name(run.world.device), config.precision)
        return {"perf/tflops_per_second": flops / 1e12} | ({} if peak is None else {"perf/mfu": flops / peak})

    def _num_own_steps(self, report: IntervalReport) -> int:
        """Return how many steps of the interval this start took; an earlier one may have begun it."""
        return min(report.totals.num_steps, report.step + 1 - self.first_step)


def build_engine(config: RunConfig, world: World, task: Task | None = None) -> Engine:
    """Build an engine that trains a run from its first step and saves no checkpoints; see `build_run`.

    Collective: every rank must call this, with the same configuration.
    """
    return Engine(build_run(config, world, task))
