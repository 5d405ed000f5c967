"""The loop: takes steps, watches what they report, and writes the model at the end."""

import logging
import time
from collections.abc import Iterator, Sequence

from lanewise.checkpoint import save_model
from lanewise.data import LaneLoader
from lanewise.engine.evaluate import Evaluation
from lanewise.engine.step import StepReport, Training, TrainStep
from lanewise.errors import NonFiniteLossError
from lanewise.lanes import Schedule
from lanewise.loggers import Logger
from lanewise.reduce import ParameterWatch, Reducer
from lanewise.run_dir import RunDir
from lanewise.world.world import World

logger = logging.getLogger(__name__)


class Engine:
    """Trains a model over a fixed number of steps.

    Collective: every rank must build it and call `fit`.

    Args:
        training: what is trained.
        train_step: runs one step.
        loader: gives the batches of this process's lanes.
        schedule: cuts epochs into steps.
        reducer: sums the gradients; closed at the end.
        world: the processes.
        last_step: the step before which training ends.
        evaluation: when and on what to evaluate; None where the task has no eval datasets.
    """

    def __init__(
        self,
        training: Training,
        train_step: TrainStep,
        loader: LaneLoader,
        schedule: Schedule,
        reducer: Reducer,
        world: World,
        last_step: int,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.training = training
        self._train_step = train_step
        self._loader = loader
        self._schedule = schedule
        self._reducer = reducer
        self._world = world
        self._watch = ParameterWatch(training.model)
        self._evaluation = evaluation
        self.last_step = last_step

    def fit(self, run_dir: RunDir, loggers: Sequence[Logger] = ()) -> None:
        """Train, and write the model to the run directory.

        Args:
            run_dir: where rank 0 writes `model.safetensors`, and the best model so far.
            loggers: get the metrics of every step and evaluation; rank 0 passes some, the others none.

        Raises:
            TaskError: if the task breaks its contract.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        start = time.perf_counter()
        num_samples = 0
        try:
            for report in self.steps():
                num_samples += self._schedule.num_samples_in(report.step)
                for step_logger in loggers:
                    step_logger.log(report.epoch, report.step, self._metrics(report))
                if self._evaluation is not None and self._evaluation.is_due_after(report.step):
                    values, is_best = self._evaluation.run()
                    if is_best and self._world.rank == 0:
                        save_model(self.training.model, run_dir.best_model)
                    for step_logger in loggers:
                        step_logger.log_evaluation(report.epoch, report.step, values)
        finally:
            self._reducer.close()
            for step_logger in loggers:
                step_logger.close()
        if self._world.rank == 0:
            save_model(self.training.model, run_dir.model)
            seconds = time.perf_counter() - start
            logger.info(
                "trained %d steps on %d samples in %.1f s: %.0f samples/s over all processes",
                self.last_step,
                num_samples,
                seconds,
                num_samples / seconds,
            )
            logger.info("model: %s", run_dir.model)

    def steps(self) -> Iterator[StepReport]:
        """Take one step after the other and look at what each of them found. Collective for each step."""
        batches = self._loader.batches(0, self.last_step)
        for step in range(self.last_step):
            self._watch.check(step)
            report = self._train_step.run(batches)
            if step == 0:
                self._describe_first(report)
            self._require_finite(report)
            if not report.totals.weight:
                logger.warning("step %d: the global batch has weight 0, so nothing was updated", step)
            yield report

    def _describe_first(self, report: StepReport) -> None:
        """Say what only the first step could show. Collective."""
        unused = self._watch.unused(self._world)
        if self._world.rank:
            return
        unit = "samples" if self._train_step.is_sample_mean else "units of the task's Loss"
        logger.info(
            "a step's loss and gradient are the mean over its %s: %g in the first", unit, report.totals.weight
        )
        if unused:
            logger.warning(
                "no lane of the first step used these parameters, so their gradient is zero: %s",
                ", ".join(unused),
            )

    def _require_finite(self, report: StepReport) -> None:
        lanes = report.totals.non_finite_lanes
        if not lanes:
            return
        described = "\n".join(
            f"  lane {lane}: loss {loss_sum}, samples {list(self._loader.indices(report.step, lane))}"
            for lane, loss_sum in ((lane.lane, lane.loss_sum) for lane in lanes)
        )
        raise NonFiniteLossError(
            f"the loss is not finite in step {report.step} (epoch {report.epoch}), which updated nothing.\n"
            f"{described}\nLook at these samples, or lower the learning rate."
        )

    def _metrics(self, report: StepReport) -> dict[str, float]:
        num_samples = self._schedule.num_samples_in(report.step)
        metrics = {
            "train/loss": report.totals.loss,
            "train/learning_rate": report.learning_rate,
            "perf/samples_per_second": num_samples / report.duration_seconds,
        }
        return metrics if report.grad_norm is None else {**metrics, "train/grad_norm": report.grad_norm}
