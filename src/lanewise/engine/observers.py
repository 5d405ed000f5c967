"""Calls the callbacks of a run, whose epochs and steps count from 1; those in here are indices."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lanewise.engine.step.metrics import IntervalReport
from lanewise.errors import noting
from lanewise.runs.callback import Callback, RunStart


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

    def _show_now(self, report: IntervalReport) -> None:
        self.write_times(report)
        metrics = self.name_metrics(report) if self.callbacks else {}
        with noting(lambda: f"in a callback after step {report.step + 1}"):
            for callback in self.callbacks:
                callback.on_step(report.epoch + 1, report.step + 1, metrics)


def _end(callback: Callback, _kind: object, error: BaseException | None, _traceback: object) -> None:
    callback.on_end(error)
