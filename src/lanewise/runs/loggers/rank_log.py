"""Gives each rank a log file; the console belongs to rank 0, and to every rank's warnings."""

import io
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast, final

from lanewise.errors import wrapped
from lanewise.runs.file import open_log, writing


@final
class RankLog:
    """Sends python's logging and warnings to a file; on rank 0 also to the console.

    A record with `extra={"is_for_file_only": True}` stays off the console, and one with
    `is_for_console_only` out of the file; that is written as it is, by any rank.

    A line that is printed is written at once, so that no end of the process loses it. On other ranks all
    that is printed goes to the file, by the file descriptors, so that native code is included: otherwise each
    line of the user's code would appear once for each process. On rank 0 it goes to the file when the console
    can no longer be written, as behind `| head`, and the run goes on.

    Args:
        path: the log file of this rank.
        rank: this process's rank.
    """

    def __init__(self, path: Path, rank: int) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A job that keeps no log names the null device.
            file: TextIO = path.open("a", encoding="utf-8") if path == Path(os.devnull) else open_log(path)
        to_file = _File(file)
        to_file.addFilter(lambda record: not getattr(record, "is_for_console_only", False))
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        keeps_log = path != Path(os.devnull)
        if rank == 0:
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(line_buffering=True)
                    if keeps_log and stream is getattr(sys, f"__{name}__"):
                        setattr(sys, name, _or_log(stream, stream.fileno(), file))
            self._console = _Console(rank, lambda: sys.stderr)  # a progress bar may have replaced it
        else:
            terminal = _or_log(cast("io.TextIOWrapper", sys.stderr), os.dup(2), file)
            self._console = _Console(rank, lambda: terminal)
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)
        logging.basicConfig(
            level=logging.INFO, handlers=[to_file, self._console], format="%(message)s", force=True
        )
        logging.captureWarnings(True)

    def share_warnings(self, is_first: Callable[[str], bool]) -> None:
        """Show the warnings of every rank on the console, each of them once.

        Args:
            is_first: tells whether this process is the first of all to ask with this text.
        """
        self._console.share(is_first)


@final
class _OrLog(io.FileIO):
    """A stream to the console; when that takes nothing any more, the log does."""

    def __init__(self, number: int, log: TextIO) -> None:
        super().__init__(number, "w", closefd=False)
        self._log = log

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._log.write(
                f"the console cannot be written any more ({error.strerror}); what it misses follows\n"
            )
            os.dup2(self._log.fileno(), self.fileno())
            return super().write(data)


def _or_log(stream: io.TextIOWrapper, number: int, log: TextIO) -> TextIO:
    """Make a stream like the given one, to a file descriptor, for which the log stands in."""
    stream.flush()
    raw = _OrLog(number, log)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@final
class _File(logging.StreamHandler[TextIO]):
    """The log file; where it cannot be written any more, the console says so once."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self._has_failed:
            self._has_failed = True
            logging.getLogger(__name__).warning("the log %s cannot be written any more", self.stream.name)


@final
class _Console(logging.Handler):
    """The terminal on which a run was started."""

    def __init__(self, rank: int, stream: Callable[[], TextIO]) -> None:
        super().__init__()
        self._is_first: Callable[[str], bool] | None = None
        self._stream = stream
        self._rank = rank
        self._pid = os.getpid()
        self._said: Counter[str] = Counter()

    def share(self, is_first: Callable[[str], bool]) -> None:
        """Show what any rank warns of, if it is the first to ask."""
        self._is_first = is_first

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record that has a place on the console."""
        if getattr(record, "is_for_file_only", False):
            return
        text = self.format(record)
        if getattr(record, "is_for_console_only", False):
            self._write(text)
            return
        # A process that was forked, to load data, must not ask the other ranks.
        is_first = self._is_first if os.getpid() == self._pid else None
        if self._rank == 0 and (record.levelno < logging.WARNING or is_first is None):
            self._write(text)
        elif record.levelno >= logging.WARNING and is_first is not None:
            self._said[text] += 1  # what one rank says twice, all ranks may say twice
            if is_first(f"{self._said[text]} {text}"):
                self._write(text if self._rank == 0 else f"[rank {self._rank}] {text}")

    def _write(self, text: str) -> None:
        stream = self._stream()
        stream.write(f"{wrapped(text, stream)}\n")
        stream.flush()
