"""Writes the lines of metrics.jsonl to the standard output, for programs that follow a run."""

import json
from collections.abc import Mapping
from typing import final

from lanewise.runs.callback import Callback
from lanewise.runs.loggers.jsonl import columns_of


@final
class JsonConsoleLogger(Callback):
    """Writes a line for each logged step, each epoch that is counted, and each evaluation."""

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        print(json.dumps(columns_of(epoch, step, metrics)), flush=True)  # noqa: T201 - what it is for

    on_epoch = on_evaluation = on_step
