"""SIGTERM and SIGUSR1 as a wish to save and stop, in each kind of process that may get them.

    lanewise, one process       the signal's handler notes it
    torchrun's or srun's worker likewise; they pass the signal on to every process
    lanewise, the launcher      makes a file, for which every rank looks in each step
    a worker of that launcher   a thread takes the signal: from anybody it is such a wish, but from the agent
                                in the launcher it says that another worker failed, and ends the process

The wish is voted on, so it is enough that one rank has it. A second signal ends the process.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STOP_FILE_VARIABLE = "LANEWISE_STOP_FILE"
"""Environment variable in which the launcher tells its workers for which file to look."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_noted = threading.Event()


def wants_stop() -> bool:
    """Tell whether this process was asked to save and stop."""
    stop_file = os.environ.get(STOP_FILE_VARIABLE)
    return _noted.is_set() or (stop_file is not None and Path(stop_file).exists())


def watch_as_worker() -> None:
    """Begin to take the signals in a thread; call it before any other thread exists.

    A handler of python's would wait for the main thread, which may be in a collective with a rank that is
    gone.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_take_signals, name="signals", daemon=True).start()


@contextmanager
def watching() -> Iterator[None]:
    """Take the signals for a while by handlers, unless a thread does; only the main thread can do that."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or set(_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        yield
        return
    with handling(_noted.set):
        yield


@contextmanager
def handling(note: Callable[[], None]) -> Iterator[None]:
    """Call a function at the first of the signals; the second one does what it did before."""

    def handle(sign: int, _frame: object) -> None:
        note()
        signal.signal(sign, before[signal.Signals(sign)])

    before = {sign: signal.signal(sign, handle) for sign in _SIGNALS}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _take_signals() -> None:
    while True:
        info = signal.sigwaitinfo(_SIGNALS)
        if info.si_pid == os.getppid() or _noted.is_set():
            os._exit(128 + info.si_signo)
        _noted.set()
