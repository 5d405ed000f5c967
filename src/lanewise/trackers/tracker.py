"""Mirrors metrics.jsonl of a run to a tracker, each line once, whatever becomes of either."""

import hashlib
import heapq
import itertools
import json
import logging
import threading
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final

from lanewise.errors import ConfigError, PreemptedError, text_of
from lanewise.processes.watch.heartbeat import OWN_CODE, heartbeat
from lanewise.runs.callback import LineCallback, RunStart
from lanewise.runs.dir import RunDir
from lanewise.runs.media import Media

logger = logging.getLogger(__name__)

_SECONDS_AT_END = 60.0
"""How long the end of a run waits for what was not sent yet."""


@dataclass(frozen=True)
class Line:
    """A line of metrics.jsonl: a logged step, or what follows one."""

    number: int
    """The number of the line, from 1, over the whole run; events are not counted. A run that goes on cuts the
    lines after its checkpoint, and writes them again under the same numbers."""
    epoch: int
    step: int
    seconds: float
    """When it was written, since the epoch."""
    values: Mapping[str, float]
    """The values by name; those that are not finite are NaN."""


@dataclass(frozen=True)
class End:
    """How a start of a run ended."""

    reason: str
    """finished, preempted or error."""
    model_sha256: str | None
    """The digest of model.safetensors; None where the run did not write it."""


class Tracker(LineCallback, ABC):
    """Sends what is in metrics.jsonl and media.jsonl to a tracker, from a thread of its own.

    When a run starts, the tracker is asked for the last line that it has, and gets those after it: what an
    earlier start could not send, and what this one logs. So a run that is killed and goes on, on any number
    of devices, is one run there, with each step once. A tracker that cannot be reached never stops a run: a
    warning says so once, and the next start sends what is missing.
    """

    package: ClassVar[str] = ""
    """What must be installed."""

    def __init__(self) -> None:
        if self.package and find_spec(self.package) is None:
            raise ConfigError(
                f"lanewise.trackers.{type(self).__name__} needs the package {self.package}, which is not "
                f"installed: pip install {self.package}."
            )

    @abstractmethod
    def open(self, start: RunStart) -> int:
        """Begin the run of `start.run_id`, or go on with it; return the number of its last line."""

    @abstractmethod
    def send(self, line: Line) -> None:
        """Send a line."""

    def send_media(self, line: Line, step: int, media: Media) -> None:
        """Send a text or an image, which was logged after a step; by default it stays in media.jsonl.

        Args:
            line: the last one up to that step, or the first one of the run. It may get several.
            step: after which it was logged; 0 before the first one.
            media: the text or the image.
        """

    @abstractmethod
    def close(self, end: End) -> None:
        """Send how it ended, and wait until everything is stored."""

    def on_start(self, start: RunStart) -> None:
        self._more, self._end = threading.Event(), None
        self._thread = threading.Thread(target=self._mirror, args=(start,), daemon=True)
        self._thread.start()

    def on_line(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self._more.set()

    def on_media(self, epoch: int, step: int, media: Media) -> None:
        """It is in media.jsonl by now."""
        self._more.set()

    def on_end(self, error: BaseException | None) -> None:
        """Waits for what was not sent yet, but not for ever."""
        self._end = (
            "finished" if error is None else "preempted" if isinstance(error, PreemptedError) else "error"
        )
        self._more.set()
        # What ends by itself is no stall.
        before, heartbeat.note = heartbeat.note, (OWN_CODE, heartbeat.step, None)
        self._thread.join(_SECONDS_AT_END)
        heartbeat.note = before
        if self._thread.is_alive():
            logger.warning(
                "%s did not take everything in %.0f s. metrics.jsonl has it, and --resume sends it.",
                type(self).__name__,
                _SECONDS_AT_END,
            )

    _end: str | None = None

    def _mirror(self, start: RunStart) -> None:
        run_dir = RunDir(start.run_dir)
        try:
            kept = self.open(start)
            if kept and start.first_step > 1 and start.config.distributed.equality == "close":
                logger.info(
                    "%s keeps the %d lines that it has; what this start computes again may differ from them "
                    "by rounding",
                    type(self).__name__,
                    kept,
                )
            line: Line | None = None
            early: list[_Shown] = []
            for found in self._read(run_dir):
                if isinstance(found, Line):
                    line = found
                    if line.number > kept:
                        self.send(line)
                else:
                    early.append(found)
                if line is not None:
                    shown, early = early, []
                    # With its last line an earlier start may have been killed.
                    for media in shown if line.number >= kept else ():
                        self.send_media(line, media.step, media.media)
            assert self._end is not None
            is_finished = self._end == "finished" and run_dir.model.exists()
            digest = hashlib.sha256(run_dir.model.read_bytes()).hexdigest() if is_finished else None
            self.close(End(self._end, digest))
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
            logger.warning(
                "%s takes no more numbers of this run: %s. The run continues, metrics.jsonl has all of them, "
                "and the next start with --resume sends what is missing.",
                type(self).__name__,
                text_of(error),
            )

    def _read(self, run_dir: RunDir) -> Iterator["Line | _Shown"]:
        """Yield what is there and what comes, until the run ends: media after the lines up to their step."""
        metrics, media = _Tail(run_dir.metrics), _Tail(run_dir.media)
        takes_media = type(self).send_media is not Tracker.send_media
        numbers = itertools.count(1)
        while True:
            self._more.clear()
            is_last = self._end is not None
            end, end_of_media = metrics.end(), media.end() if takes_media else 0
            while end != (later := metrics.end()):  # the media ahead of a line that came meanwhile may lack
                end, end_of_media = later, media.end() if takes_media else 0
            found = (columns for columns in metrics.read(end) if "event" not in columns)
            lines = (_line(next(numbers), columns) for columns in found)
            shown = (_shown(columns) for columns in media.read(end_of_media))
            both: tuple[Iterator[Line | _Shown], ...] = (lines, shown)
            yield from heapq.merge(*both, key=lambda found: (found.step, isinstance(found, _Shown)))
            if is_last:
                return
            self._more.wait()


@dataclass(frozen=True)
class _Shown:
    """A line of media.jsonl."""

    step: int
    media: Media


@final
class _Tail:
    """Reads what was added to a file of JSON lines, which need not be there."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def end(self) -> int:
        """Return the size of the file, in bytes."""
        return self._path.stat().st_size if self._path.exists() else 0

    def read(self, end: int) -> Iterator[dict[str, Any]]:
        """Yield the new lines that begin ahead of `end`; one that is half-written stays for the next time."""
        if self._offset >= end:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while self._offset < end and (text := file.readline()).endswith(b"\n"):
                self._offset += len(text)
                yield json.loads(text)


def _shown(columns: Mapping[str, Any]) -> _Shown:
    png = columns.get("png")
    media = Media(columns["name"], columns.get("text"), None if png is None else b64decode(png))
    return _Shown(columns["step"], media)


def _line(number: int, columns: dict[str, Any]) -> Line:
    epoch, step, seconds = columns.pop("epoch"), columns.pop("step"), columns.pop("time")
    columns.pop("largest_loss", None)
    values = {name: float("nan") if value is None else value for name, value in columns.items()}
    return Line(number, epoch, step, seconds, values)


def name_of(start: RunStart) -> str:
    """Return the name of a run: that of its folder."""
    return start.run_dir.absolute().name
