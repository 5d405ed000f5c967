"""Every error that lanewise raises on purpose, and the exit code of the command line for each.

    LanewiseError               exit code 1
    +-- ConfigError             2   the configuration asks for something impossible; lists every mistake
    +-- TaskError               2   the user's Task breaks its contract (a loss without a gradient, ...)
    +-- DataError               2   the dataset is empty, or differs between processes
    +-- RunDirError             2   the run directory is in use, or holds a run already
    +-- CheckpointError         2   a file of weights is not there, not whole, or of another model
    +-- StorageError            1   a file of the run cannot be written: the disk is full, or out of order
    +-- NonFiniteLossError      1   a lane's loss is NaN or infinite
    +-- WorldError              1   the processes cannot form a world, or disagree with each other
    |   +-- LostRankError       1   another process has ended, whose own error says why
    +-- LaunchError             1   a worker process failed
    +-- PreemptedError         75   a signal stopped the run, after a checkpoint was saved: start it again

An exit code is also explained in `_HELP` of `cli/main.py`.
A user's mistake is shown as its message alone, without a traceback; an `AssertionError` is a bug of ours.
"""

import os
import re
import shutil
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TextIO, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MAX_LENGTH = 600
_MAX_MISTAKES = 10
MOST_SHOWN = 8
"""Of samples or lanes that a message lists."""


class LanewiseError(Exception):
    """Base of all errors raised on purpose; its message says what is wrong and what to change."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Show it as `raised_at_call` does; IPython asks for this."""
        _leave_users_frames(self)
        return traceback.format_exception(self)


class ConfigError(LanewiseError, ValueError):
    """The configuration cannot be run.

    Args:
        mistakes: one complete sentence for each mistake, all of those that were found.
    """

    exit_code = 2

    def __init__(self, *mistakes: str) -> None:
        super().__init__(*map(_one_line, mistakes))
        self.mistakes: Sequence[str] = self.args

    def __str__(self) -> str:
        return "\n".join(mistakes_of(self))


@contextmanager
def collecting(mistakes: list[str]) -> Iterator[None]:
    """Add the mistakes of a ConfigError of the block to a list, so that more of them can be found."""
    try:
        yield
    except ConfigError as error:
        mistakes += error.mistakes


class TaskError(LanewiseError):
    """The user's Task does something that training cannot work with."""

    exit_code = 2


class DataError(LanewiseError):
    """The dataset cannot be trained on."""

    exit_code = 2


class RunDirError(LanewiseError):
    """The run directory cannot be written by this run."""

    exit_code = 2


class CheckpointError(LanewiseError):
    """A checkpoint or a file of weights cannot be loaded."""

    exit_code = 2


class StorageError(LanewiseError):
    """A file of the run cannot be written."""


class NonFiniteLossError(LanewiseError):
    """The loss of some lane is NaN or infinite; the update of that step was not applied."""


class WorldError(LanewiseError):
    """The processes cannot form one world, or one of them disagrees with the others."""


class LostRankError(WorldError):
    """Another process of the world has ended, or cannot be reached: its own error comes first."""


class LaunchError(LanewiseError):
    """A worker process failed.

    Args:
        message: what the first failing worker said, with its rank and host.
        exit_code: the exit code of that worker; 1 where a signal ended it.
        rank: of that worker; None where none was started.
        kind: the name of the class in this module that the worker raised; empty where it raised another.
    """

    def __init__(self, message: str, exit_code: int = 1, rank: int | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank
        self.kind = kind

    @property
    def cause(self) -> LanewiseError | None:
        """The error that the worker raised, with its rank and host; None where it raised none of ours."""
        cls = globals().get(self.kind)
        if not (isinstance(cls, type) and issubclass(cls, LanewiseError)):
            return None
        return cls(*(str(self).splitlines() if cls is ConfigError else [str(self)]))


class PreemptedError(LanewiseError):
    """SIGTERM, SIGUSR1 or SIGUSR2 stopped the run at a step boundary, after a checkpoint was saved."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


def shorten(numbers: Sequence[int]) -> str:
    """Write the first `MOST_SHOWN` of many numbers, such as the indices of the samples of a micro-batch."""
    if len(numbers) <= MOST_SHOWN:
        return str(list(numbers))
    return f"{list(numbers[:MOST_SHOWN])} and {len(numbers) - MOST_SHOWN} more"


def text_of(error: BaseException) -> str:
    """Return what an error says; an error whose `__str__` raises must not hide itself."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - of the user's code
        return "<exception str() failed>"  # as in a traceback


def describe(error: BaseException) -> str:
    """Return what an error says, with the notes of where it arose.

    An error of ours that arose in a loader process says it at the end of that process's traceback.
    """
    text = text_of(error)
    if isinstance(error, LanewiseError) and f"\nOriginal {_HEAD}" in text:
        text = text.rpartition(f".{type(error).__name__}: ")[2].rstrip()
    return "\n".join([text, *getattr(error, "__notes__", [])])


def traceback_of(error: BaseException) -> str:
    """Write a traceback from the first frame of the user's code that lanewise called, if there is one.

    Of an error in a loader process this is the traceback of that process. Where one ended, no traceback says
    why: the error arises wherever this process happens to be.
    """
    written = traceback.TracebackException.from_exception(error)
    if type(error) is RuntimeError and text_of(error).startswith(_LOADER_ENDED):
        return "".join(written.format_exception_only()).rstrip()
    begin_with_users_code(written.stack)
    shown = "".join(written.format()).rstrip()
    _, is_in_loader, in_loader = shown.partition(f"\nOriginal {_HEAD}")
    if not is_in_loader:
        return shown
    frames = re.split(r"^(?=  File \")", in_loader, flags=re.MULTILINE)[1:]
    start = _first_of_user([frame.split('"', 2)[1] for frame in frames])
    return "".join([_HEAD, *frames[start:]])


def raised_at_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate what scripts and notebooks call: an error of ours arises where they call it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except LanewiseError as error:
            _leave_users_frames(error)
            raise  # which adds no frame of this function

    return call


def _leave_users_frames(error: BaseException) -> None:
    """Remove our frames from the traceback of an error, and of one of ours all but the user's.

    A cause that arose in our code, or whose text the error has, says nothing new, and is not shown.
    """
    kept: TracebackType | None = None
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        is_ours = str(frame.f_globals.get("__name__")).partition(".")[0] == __package__
        if not is_ours and (_is_users(frame.f_code.co_filename) or not isinstance(error, LanewiseError)):
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    error.__traceback__ = kept
    if (cause := error.__cause__ or error.__context__) is not None:
        _leave_users_frames(cause)
        if cause.__traceback__ is None or text_of(cause) in text_of(error):
            error.__cause__ = None  # nor its context


def begin_with_users_code(stack: traceback.StackSummary) -> None:
    """Remove what is above the first frame of the user's code that lanewise called, if there is one."""
    del stack[: _first_of_user([frame.filename for frame in stack])]


def _first_of_user(filenames: Sequence[str]) -> int:
    """Return which of a traceback's frames is the first of the user's code that lanewise called; 0: none."""
    is_called = False
    for number, filename in enumerate(filenames):
        if filename.startswith(_OURS):
            is_called = True
        elif is_called and _is_users(filename):
            return number
    return 0


_HEAD = "Traceback (most recent call last):\n"
_LOADER_ENDED = "DataLoader worker (pid"
_OURS, _PYTHONS = (f"{Path(file).parent}{os.sep}" for file in (__file__, os.__file__))


def _is_users(filename: str) -> bool:
    """Tell whether code that is not lanewise's is neither python's nor an installed package's."""
    is_installed = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    return not is_installed and not filename.startswith((_PYTHONS, "<frozen "))


_TORCHS_SIGNAL_HANDLER = "torch/utils/data/_utils/signal_handling.py"
"""Raises an error over whatever code is running, when a loader process was killed."""


def note_place(error: BaseException, place: str) -> None:
    """Add to an error of the user's code where it arose.

    Raises:
        TaskError: instead of a SystemExit.
    """
    if isinstance(error, SystemExit):
        refused = refuse_exit(f"sys.exit({error.code!r})", traceback.extract_tb(error.__traceback__)[-1])
        refused.add_note(place)
        raise refused from error
    if isinstance(error, Exception):
        where = traceback.extract_tb(error.__traceback__)[-1]
        if not where.filename.endswith(_TORCHS_SIGNAL_HANDLER):
            error.add_note(place)


@contextmanager
def noting(place: Callable[[], str]) -> Iterator[None]:
    """Do `note_place` for errors of a block. Takes 1.2 us: in what a lane does, catch them yourself.

    Args:
        place: asked if there is an error.
    """
    try:
        yield
    except BaseException as error:
        note_place(error, place())
        raise


def refuse_exit(call: str, where: traceback.FrameSummary) -> TaskError:
    """Return the error that stands for a call with which the user's code would end a process.

    Otherwise the process would seem to be done, and others would wait for it, or fail in its place.
    """
    return TaskError(
        f"{call} was called before the end, in {where.filename}, line {where.lineno}. "
        "Raise an exception where the run cannot continue; to end it earlier, set train.max_steps."
    )


def mistakes_of(error: LanewiseError) -> Sequence[str]:
    """Return what an error says, one text for each mistake; if there are very many, the first ones."""
    if not isinstance(error, ConfigError):
        return [describe(error)]
    num_more = len(error.mistakes) - _MAX_MISTAKES
    if num_more <= 0:
        return error.mistakes
    return [*error.mistakes[:_MAX_MISTAKES], f"There are {num_more:,} more mistakes. Correct these first."]


_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_KEPT = "\n\t\xa0\u200c\u200d\u3000"
"""What shows no character, but is part of texts in some languages."""


def printable(text: str, kept: str = "") -> str:
    """Write what a terminal would obey, such as an escape or a new line, or not show, as what it is."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def plain_lines(text: str) -> str:
    """Return what another process says, without colours; none of its lines looks like an error of ours."""
    return printable(_COLOURS.sub("", text), _KEPT).replace("\nerror:", "\n  error:")


def _one_line(text: str) -> str:
    """Write text, which may quote names and values of the user, on one line of a terminal."""
    text = printable(text)
    half = _MAX_LENGTH // 2
    return text if len(text) <= _MAX_LENGTH else f"{text[:half]} ... {text[-half:]}"


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i)?B\b|m?s\b|[MG]B\b|Gbit/s)")


def wrapped(text: str, stream: TextIO) -> str:
    """Break long lines between words where they go to a terminal, which would break them anywhere.

    A number stays beside its unit.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(
            _BEFORE_UNIT.sub("\0", line), width, break_long_words=False, break_on_hyphens=False
        ).replace("\0", " ")
        for line in text.split("\n")
    )
