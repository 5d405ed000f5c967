"""Calls the callbacks of a run, whose epochs and steps count from 1; those in here are indices."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lanewise.engine.evaluation.evaluator import eval_mode
from lanewise.engine.run.run import Run
from lanewise.engine.step.metrics import IntervalReport, StepReport
from lanewise.errors import ConfigError, noting
from lanewise.lanes import callback_seed
from lanewise.processes.device.random_state import kept_random_state, set_random_state
from lanewise.processes.watch.heartbeat import CALLBACK, heartbeat
from lanewise.processes.world.digests import gather_digests
from lanewise.runs.callback import Callback, RunStart
from lanewise.runs.media import Media


@dataclass(frozen=True)
class Observers:
    """The callbacks, and the reports that they have not been shown yet."""

    callbacks: Sequence[Callback]
    """None on ranks other than 0."""
    write_times: Callable[[IntervalReport], None]
    """Writes what this process spent its time on, on every rank; may wait for the device."""
    name_metrics: Callable[[IntervalReport], Mapping[str, float]]
    """Returns the metrics of a report by name; may wait for the device."""
    num_behind: int
    """How many steps later a report is shown. The numbers of a step are known only when an accelerator has
    completed it, so they are read while the next step runs."""
    _unseen: deque[IntervalReport | None] = field(default_factory=deque, init=False)

    @contextmanager
    def observing(self, start: RunStart) -> Iterator[None]:
        """Call `on_start` of each callback now, and `on_end` at the end of the block, even after an error."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                vars(callback).pop("stop_reason", None)  # of an earlier run
                stack.push(partial(_end, callback))
                callback.on_start(start)
            yield

    def stop_reason(self) -> str | None:
        """Why a callback ends the run; None where none does."""
        for callback in self.callbacks:
            if callback.stop_reason is not None:
                return callback.stop_reason
        return None

    def show(self, report: IntervalReport | None) -> None:
        """Show the report of a step, now or `num_behind` steps later; None where the step is not logged."""
        self._unseen.append(report)
        if len(self._unseen) > self.num_behind and (due := self._unseen.popleft()) is not None:
            self._show_now(due)

    def catch_up(self) -> None:
        """Show the reports that were not shown yet."""
        for report in filter(None, self._unseen):
            self._show_now(report)
        self._unseen.clear()

    def show_epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Show how much an epoch read."""
        for callback in self.callbacks:
            callback.on_epoch(epoch + 1, step + 1, values)

    def show_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Show the values of an evaluation."""
        for callback in self.callbacks:
            callback.on_evaluation(epoch + 1, step + 1, values)

    def show_best(self, epoch: int, step: int, model: Path) -> None:
        """Show that the best model so far was written."""
        for callback in self.callbacks:
            callback.on_best(epoch + 1, step + 1, model)

    def show_digests(self, epoch: int, step: int, digests: Mapping[str, str]) -> None:
        """Show the digests of the state after a step."""
        self.catch_up()
        for callback in self.callbacks:
            callback.on_digests(epoch + 1, step + 1, digests)

    def _show_now(self, report: IntervalReport) -> None:
        self.write_times(report)
        metrics = self.name_metrics(report) if self.callbacks else {}
        largest = report.totals.largest
        with noting(lambda: f"in a callback after step {report.step + 1}"):
            for callback in self.callbacks:
                if largest is not None:
                    shown = largest._replace(step=largest.step + 1)
                    callback.on_largest_loss(report.epoch + 1, report.step + 1, shown)
                callback.on_step(report.epoch + 1, report.step + 1, metrics)


@final
class ShownModel:
    """Shows the model to the callbacks that have `on_model`, which are on rank 0.

    Collective: every rank must construct it, and call `show` after the same steps.

    Args:
        run: whose model it is.
        observers: the callbacks of this process.

    Raises:
        ConfigError: if a callback wants it after a number of steps that is none.
    """

    def __init__(self, run: Run, observers: Observers) -> None:
        self._run, self._observers = run, observers
        self._callbacks = [
            callback for callback in observers.callbacks if type(callback).on_model is not Callback.on_model
        ]
        every = [callback.model_every_steps for callback in self._callbacks]
        if any(steps is not None and steps < 1 for steps in every):
            raise ConfigError(f"model_every_steps of a callback must be at least 1, or None: got {every}.")
        self.every: list[int | None] = run.world.broadcast_tree(every)
        """After how many steps each callback wants it, on every rank; None: after each evaluation."""
        self._values: object = None

    def show(self, step: int, *, to_all: bool) -> None:
        """Show the model after a step to those that are due then. Collective: every rank must call this.

        Args:
            step: -1 is before the first one.
            to_all: whether all are due.
        """
        values = None if self._run.evaluation is None else self._run.evaluation.last_values
        is_evaluated, self._values = values is not self._values, values
        due = [
            number
            for number, every in enumerate(self.every)
            if to_all or (is_evaluated if every is None else (step + 1) % every == 0)
        ]
        if not due:
            return
        self._observers.catch_up()
        heartbeat.note = (CALLBACK, step, None)
        self._run.enter_weights(step)
        model = self._run.training.evaluated_model
        with self._run.evaluation_weights(), self._run.reducer.whole(model):
            if self._callbacks:
                self._show([self._callbacks[number] for number in due], step, model)

    def _show(self, callbacks: Sequence[Callback], step: int, model: nn.Module) -> None:
        """Show the model in a way that leaves no trace in the run, and hand on what the callbacks log."""
        epoch, runner = self._run.loader.end_of(step).epoch if step >= 0 else -1, self._run.runner
        logged: list[Media] = []
        with (
            noting(lambda: f"in on_model of a callback after step {step + 1}"),
            kept_random_state(),
            torch.no_grad(),
            runner.precision.forward(),
            # Texts of many lengths would use up how often torch compiles the model.
            torch.compiler.set_stance("force_eager") if self._run.config.compile else nullcontext(),
            register_module_forward_hook(_note_progress),
        ):
            for callback in callbacks:
                set_random_state(callback_seed(runner.seed, step))
                object.__setattr__(callback, "logged_media", logged)  # a frozen dataclass may be a callback
                with eval_mode(model, f"on_model of {type(callback).__name__}"):
                    callback.on_model(epoch + 1, step + 1, model)
                object.__setattr__(callback, "logged_media", None)
        for media in logged:
            for callback in self._observers.callbacks:
                callback.on_media(epoch + 1, step + 1, media)


def digested(
    steps: Iterator[StepReport], run: Run, observers: Observers, ends_with: Callable[[int], bool]
) -> Iterator[StepReport]:
    """Return an iterator of the same steps, that shows digests of the state after those that are due.

    Collective, as the steps are.

    Args:
        steps: each item is a step that was taken.
        run: whose state it is; its configuration says which steps are due, besides the last one.
        observers: the callbacks of this process.
        ends_with: tells whether a step is the last one.

    Raises:
        WorldError: if a tensor differs between processes that should have it alike.
    """
    every = run.config.integrity.digest_every_steps
    if every is None:
        return steps

    def show_due() -> Iterator[StepReport]:
        for report in steps:
            if (report.step + 1) % every == 0 or ends_with(report.step):
                digests = gather_digests(run.state.take(), run.world, report.step + 1)
                observers.show_digests(run.loader.end_of(report.step).epoch, report.step, digests)
            yield report

    return show_due()


def _note_progress(*_: object) -> None:
    heartbeat.num_pieces += 1


def _end(callback: Callback, _kind: object, error: BaseException | None, _traceback: object) -> None:
    callback.on_end(error)
