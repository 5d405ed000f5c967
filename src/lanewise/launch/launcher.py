"""What every launcher does: it runs the workers of a job somewhere, and waits for them."""

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import NoReturn

from lanewise.launch.agent import JobFiles, Workers
from lanewise.launch.membership import Members
from lanewise.processes.watch.failure import Failure


class Launcher(ABC):
    """Starts the workers of a job, and waits for all of them.

    A new one is a file here, a name in `LauncherName` (`config/launchers.py`) and a line in the table of
    `commands/jobs/launchers.py`. If it has a section, this is a field of `config/distributed.py`, and a name
    in `_OF_LAUNCHERS` of `kubernetes.py`.
    """

    @abstractmethod
    def run(self, workers: Workers, files: JobFiles) -> None:
        """Run the workers; the result is in `files`, if their job has one.

        What they print goes to this process's standard streams. When this call returns or raises, or when
        this process is killed, all of them have ended. Where they are started again, one line says why; a
        user's mistake, or the same error at the same step twice, ends the launch instead.

        Args:
            workers: what they do.
            files: of this process.

        Raises:
            LaunchError: what the first failing worker said.
            KeyboardInterrupt: on SIGINT; SystemExit: on the other signals that end the launch.
        """

    @abstractmethod
    def describe(self) -> str:
        """Say exactly what `run` would start or submit; contacts nothing, and shows no secret."""


def count_processes(number: int) -> str:
    """Write "1 process" or "2 processes"."""
    return f"{number} process{'es' * (number != 1)}"


def run_again(
    signals: Sequence[signal.Signals],
    stderr: int,
    members: Members,
    run_once: Callable[[int], Failure | None],
) -> None:
    """Start all workers, and again as often as they may fail.

    Args:
        signals: those, besides SIGINT, that end the launch.
        stderr: the file descriptor for the line that says why.
        members: say after which failures they start again.
        run_once: starts them, after so many restarts, and returns the first failure.
    """
    with ending_on(signals):
        for num_restarts in count():
            failure = run_once(num_restarts)
            if failure is None:
                return
            line = f"{members.fail(failure)}\n"
            with suppress(OSError):  # nobody listens
                os.write(stderr, line.encode(errors="backslashreplace"))


@contextmanager
def ending_on(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Raise SystemExit on some signals; does nothing outside of the main thread, which gets them."""

    def end(sign: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + sign)

    is_main = threading.current_thread() is threading.main_thread()
    before = {sign: signal.signal(sign, end) or signal.SIG_DFL for sign in (signals if is_main else ())}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
