"""Writes run.jsonl: one JSON object for each start of a run, and one for its end."""

import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

from lanewise.errors import PreemptedError, text_of
from lanewise.runs.file import JsonLines, json_object, open_log, open_regular, writing

_lock = threading.Lock()
"""Several threads of a process may end its run."""

_begun: "RunRecord | None" = None

_TAIL_BYTES = 2**20
"""How many bytes at the end of a file of metrics its last line is looked for in."""


@dataclass(frozen=True)
class RunEnd:
    """Why a start of a run ended."""

    reason: Literal["finished", "stopped early", "preempted", "error"]
    last_step: int | None = None
    """The last step that was taken, from 1; None: that of the last line of metrics, if there is one."""
    error: str | None = None
    """The class of the error."""
    text: str | None = None
    """What it says."""

    @classmethod
    def of_error(cls, error: BaseException) -> "RunEnd":
        """Make the end of a run that an error, or a signal, ended."""
        if isinstance(error, PreemptedError):
            return cls("preempted")
        return cls("error", error=type(error).__name__, text=text_of(error))


@final
class RunRecord:
    """The starts of a run, and how each ended; one that was killed has no end.

    Each place that may see the end makes a record of its own, before the run begins: the starts that are
    there already get no end. Whichever tells the end first is right, and the others change nothing.

    Args:
        path: the file, made with the first start. A last line that a killed process left half-written does
            not count, and is removed when the next one is written.

    Raises:
        StorageError: if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old_starts = {line["id"] for line in self._read()[0]}

    def begin(self, start: Mapping[str, Any]) -> str:
        """Write a start.

        Args:
            start: what is known of it.

        Returns:
            The id of the run, which its first start chose.

        Raises:
            StorageError: if it cannot be written.
        """
        global _begun  # noqa: PLW0603 - that of the process, for `end_begun`
        with _lock:
            lines, size = self._read()
            identifier = uuid.uuid4().hex
            run_id = lines[0]["run_id"] if lines else identifier
            self._append(size, {"event": "start", "run_id": run_id, "id": identifier, **start})
            _begun = self
        return str(run_id)

    def end(self, end: RunEnd) -> None:
        """Write the end of the last start, unless it has one or was there before this record was made.

        Raises:
            StorageError: if it cannot be written.
        """
        with _lock:
            lines, size = self._read()
            if not lines or lines[-1]["event"] == "end" or lines[-1]["id"] in self._old_starts:
                return
            start = lines[-1]
            last_step = end.last_step
            if last_step is None:
                logged = last_logged_step(self._path.with_name("metrics.jsonl"))
                last_step = None if logged is None or logged < start["first_step"] else logged
            columns = {"reason": end.reason, "last_step": last_step, "error": end.error, "text": end.text}
            known = {name: value for name, value in columns.items() if value is not None}
            self._append(size, {"event": "end", "run_id": start["run_id"], "id": start["id"], **known})

    def stands_still(self) -> bool:
        """Tell whether the last two starts that were told to stop ended before the same step."""
        stopped = [line.get("last_step") for line in self._read()[0] if line.get("reason") == "preempted"]
        return len(stopped) > 1 and stopped[-1] == stopped[-2]

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """Return the lines that can be read, and how many bytes of the file are whole lines."""
        if not os.path.lexists(self._path):
            return [], 0
        with writing(self._path), open_regular(self._path) as file:
            content = file.read()
        size = content.rfind(b"\n") + 1
        return [columns for line in content[:size].splitlines() if (columns := _event(line))], size

    def _append(self, size: int, columns: Mapping[str, Any]) -> None:
        with writing(self._path), open_log(self._path) as file:
            file.truncate(size)
        with closing(JsonLines(self._path)) as lines:
            lines.write({"time": datetime.now(UTC).isoformat(), **columns})


def end_begun(end: RunEnd) -> None:
    """Write the end of the start that this process wrote, if it wrote one; see `RunRecord.end`.

    For what ends the process without knowing what it does.
    """
    if _begun is not None:
        _begun.end(end)


def _event(line: bytes) -> dict[str, Any] | None:
    """Return what a line of run.jsonl has; None if it is none."""
    columns = json_object(line) or {}
    is_text = all(isinstance(columns.get(name), str) for name in ("event", "run_id", "id"))
    is_whole = columns.get("event") != "start" or type(columns.get("first_step")) is int
    return columns if is_text and is_whole else None


def last_logged_step(metrics: Path) -> int | None:
    """Return the step of the last line; None where there is none, or none that can be read."""
    try:
        with open_regular(metrics) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    steps = [step for line in lines[-2:] if type(step := (json_object(line) or {}).get("step")) is int]
    return steps[-1] if steps else None
