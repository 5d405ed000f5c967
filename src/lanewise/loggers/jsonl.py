"""Writes metrics.jsonl: one JSON object for each step and for each evaluation."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from lanewise.callback import Callback


class JsonlLogger(Callback):
    """Appends a line for each step; a number that JSON lacks (NaN, infinity) becomes null.

    Args:
        path: the file, made with the first line, so that a run which fails before leaves none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", buffering=1)  # a killed run keeps its lines
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"epoch": epoch, "step": step, **finite}) + "\n")

    def on_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """See `Callback`. A line of its own, with the step after which it was evaluated."""
        self.on_step(epoch, step, values)

    def on_end(self, error: BaseException | None) -> None:
        """See `Callback`."""
        if self._file is not None:
            self._file.close()
