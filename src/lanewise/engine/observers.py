"""Shows the callbacks of a run what happened."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from lanewise.callback import Callback
from lanewise.engine.step.metrics import IntervalReport
from lanewise.errors import noting


class Observers:
    """The callbacks, and what the last steps left to show.

    Args:
        callbacks: none on ranks other than 0.
        name_metrics: names what a report says; may wait for the device.
        num_behind: how many steps later a report is shown. What a step found is known on an accelerator only
            when it is done, so it is looked at while the next one runs.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        name_metrics: Callable[[IntervalReport], Mapping[str, float]],
        num_behind: int,
    ) -> None:
        self._callbacks = callbacks
        self._name_metrics = name_metrics
        self._num_behind = num_behind
        self._unseen: deque[IntervalReport | None] = deque()

    @contextmanager
    def observing(self, run_dir: Path, first_step: int, last_step: int) -> Iterator[None]:
        """Tell of the start of the run, and in any case of its end."""
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.push(partial(_end, callback))
                callback.on_start(run_dir, first_step, last_step)
            yield

    def show(self, report: IntervalReport | None) -> None:
        """Show the report of a step, or soon; None where the step is not logged."""
        if self._callbacks:
            self._unseen.append(report)
            self._show_all_but(self._num_behind)

    def catch_up(self) -> None:
        """Show the reports that were not shown yet."""
        self._show_all_but(0)

    def show_epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Show what an epoch read."""
        for callback in self._callbacks:
            callback.on_epoch(epoch, step, values)

    def show_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Show what an evaluation gave."""
        for callback in self._callbacks:
            callback.on_evaluation(epoch, step, values)

    def show_best(self, epoch: int, step: int, model: Path) -> None:
        """Tell that the best model was written."""
        for callback in self._callbacks:
            callback.on_best(epoch, step, model)

    def _show_all_but(self, num_behind: int) -> None:
        while len(self._unseen) > num_behind:
            report = self._unseen.popleft()
            if report is None:
                continue
            metrics = self._name_metrics(report)
            with noting(lambda step=report.step: f"in a callback after step {step}"):  # type: ignore[misc]
                for callback in self._callbacks:
                    callback.on_step(report.epoch, report.step, metrics)


def _end(callback: Callback, _kind: object, error: BaseException | None, _traceback: object) -> None:
    callback.on_end(error)
