"""Shows the callbacks of a run what happened."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from lanewise.callback import Callback
from lanewise.engine.step import StepReport
from lanewise.errors import noting


class Observers:
    """The callbacks, and the steps that they were not shown yet.

    Args:
        callbacks: none on ranks other than 0.
        name_metrics: names what a step found; may wait for the device.
        num_behind: how many steps may be shown later. What a step found is known on an accelerator only when
            it is done, so it is looked at while the next one runs.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        name_metrics: Callable[[StepReport], Mapping[str, float]],
        num_behind: int,
    ) -> None:
        self._callbacks = callbacks
        self._name_metrics = name_metrics
        self._num_behind = num_behind
        self._unseen: deque[StepReport] = deque()

    @contextmanager
    def observing(self, run_dir: Path, first_step: int, last_step: int) -> Iterator[None]:
        """Tell of the start of the run, and in any case of its end."""
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.push(partial(_end, callback))
                callback.on_start(run_dir, first_step, last_step)
            yield

    def show(self, report: StepReport) -> None:
        """Show a step, or soon."""
        if self._callbacks:
            self._unseen.append(report)
            self._show_all_but(self._num_behind)

    def catch_up(self) -> None:
        """Show the steps that were not shown yet."""
        self._show_all_but(0)

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
            metrics = self._name_metrics(report)
            with noting(lambda step=report.step: f"in a callback after step {step}"):  # type: ignore[misc]
                for callback in self._callbacks:
                    callback.on_step(report.epoch, report.step, metrics)


def _end(callback: Callback, _kind: object, error: BaseException | None, _traceback: object) -> None:
    callback.on_end(error)
