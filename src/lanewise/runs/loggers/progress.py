"""Shows on the console how far a run is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

from rich import progress
from rich.console import Console, RenderableType

from lanewise.processes.watch.heartbeat import EVALUATION, SAVE, heartbeat
from lanewise.runs.callback import TAKEN_NAMES, Callback, RunStart

_SECONDS_BETWEEN_LINES = 10.0
_LEAST_OF_BAR, _MOST_OF_BAR = 10, 40
_WIDTH_OF_TEXT = 80
"""Columns that the words and numbers beside a bar may take; a terminal that is no wider has no bar."""


@final
class _Bars(progress.Progress):
    """The bar of the run, and on a terminal below it one of the evaluation or of the save that goes on.

    The second one is drawn from the heartbeat by the thread that redraws both, so that nothing has to be
    called meanwhile.
    """

    _second: progress.TaskID | None = None

    def add_second(self) -> None:
        """Add the second bar, below those that there are."""
        self._second = self.add_task("", visible=False, total=None, epoch="", text="")

    def get_renderables(self) -> Iterable[RenderableType]:
        if self._second is not None:
            phase, (done, total) = heartbeat.note[0], heartbeat.evaluated
            is_evaluated = phase == EVALUATION
            self.update(
                self._second,
                visible=phase in (EVALUATION, SAVE),
                completed=done if is_evaluated else 0,
                total=(total or None) if is_evaluated else None,
                epoch=phase,
            )
        yield from super().get_renderables()


@final
class ProgressLogger(Callback):
    """Follows the logged steps of a run."""

    def __init__(self) -> None:
        # A notebook asks for colours (FORCE_COLOR), and does not obey what moves the cursor.
        self._console = Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._next_line = 0.0
        self._bar: progress.Progress | None = None
        self._room = 10_000
        """Columns for the bar and for what the loss reports; outside of a terminal a line may be long."""

    def on_start(self, start: RunStart) -> None:
        self._last_step = start.last_step
        if self._console.is_terminal:
            self._room = self._console.width - _WIDTH_OF_TEXT
            self._column = progress.BarColumn(min(_MOST_OF_BAR, self._room))
            self._bar = _Bars(
                progress.TextColumn("{task.fields[epoch]}"),
                *([self._column] if self._room > 0 else []),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[text]}"),
                progress.TextColumn("elapsed"),
                progress.TimeElapsedColumn(),  # between logged steps the only sign of life
                *(
                    []
                    if start.last_step is None
                    else [progress.TextColumn("left"), progress.TimeRemainingColumn()]
                ),
                console=self._console,
            )
            self._row = self._bar.add_task(
                "", total=start.last_step, completed=start.first_step - 1, epoch="", text=""
            )
            self._bar.add_second()
            self._bar.start()

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        reported = self._reported(metrics)
        speed = f"{metrics['perf/samples_per_second']:,.0f} samples/s"
        text = f"loss {_written(metrics['train/loss'])}  {reported}{speed}"
        if self._bar is not None:
            self._column.bar_width = min(_MOST_OF_BAR, self._room - len(reported))
            self._bar.update(self._row, completed=step, epoch=f"epoch {epoch}", text=text)
        elif time.monotonic() >= self._next_line or step == self._last_step:
            of = "" if self._last_step is None else f"/{self._last_step}"
            self._console.print(f"epoch {epoch}  step {step}{of}  {text}", highlight=False)
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def _reported(self, metrics: Mapping[str, float]) -> str:
        """Return what the loss reports, as far as there is room for it beside a short bar."""
        text = ""
        for name, value in metrics.items():
            group, _, of_loss = name.partition("/")
            more = f"{of_loss} {_written(value)}  "
            has_room = len(text) + len(more) + _LEAST_OF_BAR <= self._room
            if group == "train" and of_loss not in TAKEN_NAMES and has_room:
                text += more
        return text

    def on_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """A line that stays above the bar."""
        pairs = [f"epoch {epoch}", f"after step {step}", *(f"{n} {_written(v)}" for n, v in values.items())]
        for line in self._fit(pairs):
            self._console.print(line, highlight=False, soft_wrap=True)

    def on_best(self, epoch: int, step: int, model_file: Path) -> None:
        self._console.print(f"the best so far: {model_file}", highlight=False, soft_wrap=True, markup=False)

    def _fit(self, pairs: Sequence[str]) -> Iterator[str]:
        """Yield lines of whole pairs, on a terminal no wider than it is."""
        line = pairs[0]
        for pair in pairs[1:]:
            if self._console.is_terminal and len(line) + 2 + len(pair) > self._console.width:
                yield line
                line = f"    {pair}"
            else:
                line = f"{line}  {pair}"
        yield line

    def on_end(self, error: BaseException | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def _written(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
