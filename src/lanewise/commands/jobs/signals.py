"""Takes SIGTERM, SIGUSR1 and SIGUSR2 as a request to save and stop, in each kind of process that gets them.

    lanewise, one process       the signal's handler notes it
    a process of a launcher     the same; torchrun, srun and mpirun pass the signal on to every process
    lanewise, the launcher      makes a file, for which every rank looks in each step
    a worker of that launcher   a thread takes the signal and notes it

Ctrl-C in the terminal of the command is such a request as well.

In each step the ranks vote on the request, so that one rank that has it is enough. A second signal ends the
process in any case, but within a second it counts as the first: Slurm sends two at once where it takes the
nodes for another job. Before the first step there is nothing to save, and the command ends at once, with its
workers. It raises no error for that: a signal may come while python runs code that catches every error, or
ignores it, such as the callback of a weak reference. A process that is not the command's does before the
first step what it did without lanewise. A process of torchrun, srun or mpirun does not take the signals until
the first step, since it may be waiting for a process that failed, in code during which no handler runs.
"""

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lanewise.errors import PreemptedError
from lanewise.launch import JobFiles
from lanewise.launch.scratch import remove_all

STOP_FILE_VARIABLE = "LANEWISE_STOP_FILE"
"""Environment variable in which the launcher tells its workers for which file to look."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SECONDS_OF_ONE = 1.0
"""A signal that comes again within this time is the same wish."""
_noted = threading.Event()
_begun = threading.Event()
_stop_file: Path | None = None
_is_watched = False


def wants_stop() -> bool:
    """Tell whether this process was asked to save and stop."""
    return _noted.is_set() or (_stop_file is not None and _stop_file.exists())


def begin() -> None:
    """Note that training begins: from now on a request to stop waits for the end of a step."""
    _begun.set()
    if _stop_file is not None:
        with suppress(FileNotFoundError):  # the launcher has ended
            JobFiles(_stop_file).begun.touch()


def pass_on(stop_file: Path) -> None:
    """Pass requests on, by this file, to the workers that are started with it in `STOP_FILE_VARIABLE`."""
    global _stop_file  # noqa: PLW0603 - signals are the process's
    _stop_file = stop_file


def watch_as_worker() -> None:
    """Begin to take the signals in a thread; call it before any other thread exists.

    A handler of python's would wait for the main thread, which may be in a collective with a rank that
    has ended.
    """
    global _is_watched  # noqa: PLW0603 - signals are the process's
    _is_watched = True
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if stop_file := os.environ.get(STOP_FILE_VARIABLE):
        pass_on(Path(stop_file))
    threading.Thread(target=_take_signals, name="signals", daemon=True).start()


def watch_until_exit() -> None:
    """Take the signals, and Ctrl-C, by handlers as long as this process lives, which is the command's."""
    _install(_end_at_once, signal.SIGINT)
    ignore_at_exit()


def ignore_at_exit() -> None:
    """Let the signals change nothing any more at the very end of this process: then the run is done."""
    atexit.register(_ignore)


@contextmanager
def watching() -> Iterator[None]:
    """Take the signals by handlers for a while; does nothing outside of the main thread, which gets them."""
    global _is_watched  # noqa: PLW0603 - signals are the process's
    if _is_watched or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _install(signal.raise_signal)
    try:
        yield
    finally:
        _is_watched = False
        for sign, handler in before.items():
            signal.signal(sign, handler)


@contextmanager
def training() -> Iterator[None]:
    """Begin to train, and take the signals meanwhile, if nobody in this process does so already."""
    with watching():
        begin()
        yield


def _install(before_training: Callable[[int], object], *more: signal.Signals) -> dict[signal.Signals, Any]:
    """Set the handlers, and return those that were there: the second signal does what it did before.

    Args:
        before_training: what a handler does with a signal that comes so early.
        more: the signals besides the usual ones.
    """
    global _is_watched  # noqa: PLW0603 - signals are the process's
    _is_watched = True
    _noted.clear()
    _begun.clear()
    came: dict[int, float] = {}

    def handle(sign: int, _frame: object) -> None:
        now = time.monotonic()
        is_second = sign in came and (sign == signal.SIGINT or now - came[sign] > _SECONDS_OF_ONE)
        came.setdefault(sign, now)
        if is_second or not _has_begun():
            signal.signal(sign, before[signal.Signals(sign)])
        _note()
        if is_second:
            signal.raise_signal(sign)
        elif not _has_begun():
            before_training(sign)
        elif sign == signal.SIGINT:
            # Below the progress bar, whose line the cursor is on.
            _say(b"\nsaving after this step; Ctrl-C again ends at once\n")

    before = {sign: signal.signal(sign, handle) or signal.SIG_DFL for sign in (*_SIGNALS, *more)}
    return before


def _end_at_once(sign: int) -> None:
    """End this process, and with it those that it started; the kernel frees what it holds in memory."""
    if sign == signal.SIGINT:
        raise KeyboardInterrupt
    _say(b"a signal stopped the run before its first step. Start it again.\n")
    remove_all()
    os._exit(PreemptedError.exit_code)


def _say(line: bytes) -> None:
    with suppress(OSError):  # nobody listens
        os.write(2, line)


def _ignore() -> None:
    for sign in _SIGNALS:
        signal.signal(sign, signal.SIG_IGN)


def _note() -> None:
    _noted.set()
    if _stop_file is not None:
        with suppress(FileNotFoundError):  # the workers have ended
            _stop_file.touch()


def _has_begun() -> bool:
    return _begun.is_set() or (_stop_file is not None and JobFiles(_stop_file).begun.exists())


def _take_signals() -> None:
    first = math.inf
    while True:
        info = signal.sigwaitinfo(_SIGNALS)
        if time.monotonic() - first > _SECONDS_OF_ONE:
            os._exit(128 + info.si_signo)
        first = min(first, time.monotonic())
        _note()
