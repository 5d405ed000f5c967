"""Writes the lines of metrics.jsonl to the standard output, for programs that follow a run."""

from collections.abc import Mapping
from typing import Any, final

from lanewise.runs.file import dump_json
from lanewise.runs.loggers.jsonl import JsonCallback


@final
class JsonConsoleLogger(JsonCallback):
    """Writes a line for each logged step, each epoch that is counted, and each evaluation."""

    def write(self, columns: Mapping[str, Any]) -> None:
        print(dump_json(columns), flush=True)  # noqa: T201 - what it is for
