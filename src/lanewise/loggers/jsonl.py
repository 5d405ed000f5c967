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
        first_step: lines of this step and later ones are cut off, as a run that goes on writes them again.
        evaluates_first: whether it also evaluates again after the step before.
    """

    def __init__(self, path: Path, first_step: int = 0, *, evaluates_first: bool = False) -> None:
        self._path = path
        self._file: IO[str] | None = None
        if path.exists():
            cut(path, first_step, evaluates_first=evaluates_first)

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


def cut(path: Path, first_step: int, *, evaluates_first: bool = False) -> None:
    """Remove the lines from a step on, and what a killed run left unfinished.

    Args:
        path: a metrics.jsonl.
        first_step: the first step to remove.
        evaluates_first: whether to remove the evaluation after the step before as well.
    """
    kept = []
    last_step = -1
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except ValueError:
            continue
        is_evaluation = step == last_step  # its line comes after that of its step
        last_step = step
        if step < first_step and not (evaluates_first and is_evaluation and step == first_step - 1):
            kept.append(f"{line}\n")
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
