"""Shows on the console how far a run is: one bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from rich import progress
from rich.console import Console

from lanewise.callback import Callback, RunStart

_SECONDS_BETWEEN_LINES = 10.0
_WIDTH_OF_TEXT = 80
"""Columns that the words and numbers beside a bar may take; a terminal that is no wider has no bar."""


@final
class ProgressLogger(Callback):
    """Follows the logged steps of a run."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._next_line = 0.0
        self._bar: progress.Progress | None = None

    def on_start(self, start: RunStart) -> None:
        """See `Callback`."""
        self._last_step = start.last_step
        if self._console.is_terminal:
            bar_width = min(40, self._console.width - _WIDTH_OF_TEXT)
            self._bar = progress.Progress(
                progress.TextColumn("{task.fields[epoch]}"),
                *([progress.BarColumn(bar_width)] if bar_width > 0 else []),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[text]}"),
                progress.TextColumn("elapsed"),
                progress.TimeElapsedColumn(),  # between logged steps the only sign of life
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
                console=self._console,
            )
            self._row = self._bar.add_task(
                "", total=start.last_step, completed=start.first_step - 1, epoch="", text=""
            )
            self._bar.start()

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        text = f"loss {metrics['train/loss']:.4f}  {metrics['perf/samples_per_second']:,.0f} samples/s"
        if self._bar is not None:
            self._bar.update(self._row, completed=step, epoch=f"epoch {epoch}", text=text)
        elif time.monotonic() >= self._next_line or step == self._last_step:
            self._console.print(f"epoch {epoch}  step {step}/{self._last_step}  {text}", highlight=False)
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def on_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """See `Callback`. A line that stays above the bar."""
        pairs = [f"epoch {epoch}", f"after step {step}", *(f"{n} {v:.4f}" for n, v in values.items())]
        for line in self._fit(pairs):
            self._console.print(line, highlight=False, soft_wrap=True)

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
        """See `Callback`."""
        if self._bar is not None:
            self._bar.stop()
