"""The loop: takes steps, evaluates, shows observers what happened, and writes the model at the end."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lanewise.callback import Callback
from lanewise.checkpoint import save_model
from lanewise.data import LaneBatch, LaneLoader
from lanewise.engine.evaluate import Evaluation
from lanewise.engine.lane import to_device
from lanewise.engine.passes import LanePasses
from lanewise.engine.saving import Saving
from lanewise.engine.state import RunState
from lanewise.engine.step import StepReport, Training, TrainStep
from lanewise.errors import ConfigError, PreemptedError, noting
from lanewise.lanes import Schedule
from lanewise.run_dir import RunDir
from lanewise.world.accelerator import has_streams, peak_bytes
from lanewise.world.world import World

logger = logging.getLogger(__name__)


class Engine:
    """Trains a model over a fixed number of steps.

    Collective: every rank must build it and call `fit`.

    Args:
        training: what is trained.
        train_step: runs one step.
        passes: what `train_step` makes gradients with; closed at the end.
        loader: gives the batches of this process's lanes.
        schedule: cuts epochs into steps.
        world: the processes.
        last_step: the step before which training ends.
        evaluation: when and on what to evaluate; None where the task has no eval datasets.
    """

    def __init__(
        self,
        training: Training,
        train_step: TrainStep,
        passes: LanePasses,
        loader: LaneLoader,
        schedule: Schedule,
        world: World,
        last_step: int,
        evaluation: Evaluation | None,
    ) -> None:
        self.training = training
        self.train_step = train_step
        self.passes = passes
        self.loader = loader
        self._world = world
        self.evaluation = evaluation
        self.schedule = schedule
        self.identity: Mapping[str, Any] = {}
        """What the run is of, for its checkpoints."""
        self.first_step = 0
        """The step with which training begins; a run that goes on begins later."""
        self.last_step = last_step
        self.watch: Callable[[Iterator[LaneBatch]], Iterator[LaneBatch]] = lambda batches: batches
        """Passes the batches of this process on, and may look at them."""

    def fit(
        self, run_dir: RunDir, callbacks: Sequence[Callback] = (), saving: Saving | None = None
    ) -> dict[str, float]:
        """Train, and write the model to the run directory.

        Args:
            run_dir: where rank 0 writes the trained model, and the best one so far.
            callbacks: observe the run on rank 0.
            saving: saves checkpoints; None saves none.

        Returns:
            What the last evaluation gave; empty where the task has no eval datasets.

        Raises:
            TaskError: if the task breaks its contract.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
            CheckpointError: if a checkpoint could not be saved.
            PreemptedError: if a signal stopped the run.
        """
        observers = callbacks if self._world.rank == 0 else ()
        start = time.perf_counter()
        with ExitStack() as stack:
            for observer in observers:
                stack.push(partial(_end, observer))
                observer.on_start(run_dir.path, self.first_step, self.last_step)
            if saving is not None:
                self.passes.vote = saving.vote
            values = self._fit(run_dir, observers, saving)
        if self._world.rank == 0:
            self._describe_end(time.perf_counter() - start)
            logger.info("model: %s", run_dir.model)
        return values

    def _describe_end(self, seconds: float) -> None:
        """Say what was trained, in so many seconds."""
        num_steps = self.last_step - self.first_step
        if not num_steps:
            logger.info("nothing was left to train: all %d steps were taken before", self.last_step)
            return
        before = self.schedule.num_samples_before
        num_samples = before(self.last_step) - before(self.first_step)
        logger.info(
            "trained %d steps on %d samples in %.1f s: %.0f samples/s over all processes",
            num_steps,
            num_samples,
            seconds,
            num_samples / seconds,
        )

    @property
    def state(self) -> RunState:
        """All that a checkpoint of the run holds."""
        training = self.training
        return RunState(
            {
                "model": training.model,
                "optimizer": training.optimizer,
                "scheduler": training.scheduler,
                "loss_scale": training.precision.loss_scale,
                "average": training.average,
                "best": self.evaluation,
            }
        )

    def steps(self) -> Iterator[StepReport]:
        """Take one step after the other. Collective for each step."""
        batches = self.watch(
            to_device(self.loader.batches(self.first_step, self.last_step), self._world.device)
        )
        try:
            for _ in range(self.first_step, self.last_step):
                yield self.train_step.run(batches)
            self.passes.check()
        finally:
            self.passes.close()

    def _fit(self, run_dir: RunDir, observers: Sequence[Callback], saving: Saving | None) -> dict[str, float]:
        values = {} if self.evaluation is None else self.evaluation.last_values
        unseen: deque[StepReport] = deque()
        # What a step found is known on a GPU only when it is done: look at it while the next one runs.
        num_behind = 1 if has_streams(self._world.device) else 0
        if self.evaluation is not None and self.evaluation.is_due:  # a signal came before it was made
            values = self._evaluate(self.first_step - 1, run_dir, observers, saving)
        for report in self.steps():
            if self.evaluation is not None:
                self.evaluation.note_step(report.step)
            evaluates = self.evaluation is not None and self.evaluation.is_due
            stops = report.totals.wants_stop
            saves = stops or report.totals.wants_save
            if saving is not None:
                saves |= saving.is_due_after(report.step)
            unseen.append(report)
            while len(unseen) > (0 if evaluates or saves else num_behind):
                self._show(unseen.popleft(), observers)
            if evaluates or saves:
                found = self._conclude(report.step, run_dir, observers, saving, saves=saves, stops=stops)
                values = found or values
        for report in unseen:
            self._show(report, observers)
        save_model(self.training.model, run_dir.model, self._world.rank)
        if self.training.average is not None:
            save_model(self.training.average.module, run_dir.averaged_model, self._world.rank)
        return values

    def _conclude(
        self,
        step: int,
        run_dir: RunDir,
        observers: Sequence[Callback],
        saving: Saving | None,
        *,
        saves: bool,
        stops: bool,
    ) -> dict[str, float]:
        """Evaluate and save after a step, if that is due. Collective.

        Where a signal stops the run, it saves first: the evaluation is made when the run goes on.

        Args:
            step: the step that was taken.
            run_dir: gets the best model.
            observers: told what an evaluation gave.
            saving: saves checkpoints.
            saves: whether to save.
            stops: whether to save and stop.
        """
        values: dict[str, float] = {}
        if self.evaluation is not None and self.evaluation.is_due and not stops:
            try:
                values = self._evaluate(step, run_dir, observers, saving)
            except PreemptedError:
                stops = True
            except ConfigError as error:  # evaluate.best: only now is known which values a metric has
                if saving is None:
                    raise
                self.passes.check()
                saving.save(step, None, stops=False)
                saving.finish()
                raise ConfigError(
                    f"{error} The run was saved: correct it, and go on with --resume."
                ) from None
        if saving is not None and (saves or stops):
            self.passes.check()
            is_evaluated = self.evaluation is None or not self.evaluation.is_due
            metric = None if self.evaluation is None else self.evaluation.last_value
            # After the last step there is little left to do but an evaluation.
            saving.save(step, metric, stops=stops and not (is_evaluated and step + 1 == self.last_step))
        return values

    def _evaluate(
        self, step: int, run_dir: RunDir, observers: Sequence[Callback], saving: Saving | None
    ) -> dict[str, float]:
        """Evaluate, and keep the best model. Collective."""
        assert self.evaluation is not None
        with noting(lambda: f"in the evaluation after step {step}"):
            wants_stop = saving.wants_stop if saving is not None else lambda: False
            values, is_best = self.evaluation.run(wants_stop)
        epoch = step // self.schedule.steps_per_epoch
        for observer in observers:
            observer.on_evaluation(epoch, step, values)
        if is_best:
            save_model(self.training.evaluated_model, run_dir.best_model, self._world.rank)
            for observer in observers:
                observer.on_best(epoch, step, run_dir.best_model)
        return values

    def _show(self, report: StepReport, observers: Sequence[Callback]) -> None:
        if observers:
            metrics = self._metrics(report)
            with noting(lambda: f"in a callback after step {report.step}"):
                for observer in observers:
                    observer.on_step(report.epoch, report.step, metrics)

    def _metrics(self, report: StepReport) -> Mapping[str, float]:
        """Name what a step found; times and memory are those of this process."""
        seconds = {f"time/{phase}_seconds": spent for phase, spent in report.phase_seconds().items()}
        metrics = {
            "train/loss": report.totals.loss,
            "train/grad_norm": float(report.grad_norm()),
            "train/learning_rate": report.learning_rate,
            "perf/samples_per_second": self.schedule.num_samples_in(report.step) / sum(seconds.values()),
            **seconds,
            "memory/peak_gib": peak_bytes(self._world.device) / 2**30,
        }
        if self.training.precision.loss_scale is not None:
            metrics["train/skipped_steps"] = report.skipped_steps
        return metrics


def _end(observer: Callback, _kind: object, error: BaseException | None, _traceback: object) -> None:
    observer.on_end(error)
