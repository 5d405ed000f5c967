"""Writes the lines of metrics.jsonl to the standard output, for programs that follow a run."""

import json
from collections.abc import Mapping
from typing import final

from lanewise.runs.callback import LineCallback
from lanewise.runs.loggers.jsonl import columns_of


@final
class JsonConsoleLogger(LineCallback):
    """Writes a line for each logged step, each epoch that is counted, and each evaluation."""

    def on_line(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        print(json.dumps(columns_of(epoch, step, values)), flush=True)  # noqa: T201 - what it is for
