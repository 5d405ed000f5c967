"""A mode with its processes, which are kept warm between its turns, and the rounds of several modes."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, final

from lanewise.commands.bench.connection import accept, connect, listen, receive, send
from lanewise.commands.bench.job import LEAST_ROUNDS, LEAST_STEPS, BenchJob, BenchTurn, First, steps_of_turn
from lanewise.commands.bench.rounds import take_turns
from lanewise.commands.bench.row import BenchRow
from lanewise.commands.jobs.start import check_here, launch_unseen
from lanewise.errors import LanewiseError, LaunchError, text_of
from lanewise.launch.fork_client import end_servers
from lanewise.launch.scratch import temporary_folder

Show = Callable[[str], None]
"""A function that is told what is being done."""
_SECONDS_TO_END = 10.0


@final
class WarmMode:
    """One or several worlds of this machine that train their turns at the same time.

    The constructor starts them, and returns when all have taken the first steps of the run.

    Args:
        jobs: one for each world.

    Raises:
        LanewiseError: what the first failing process said.
    """

    def __init__(self, jobs: Sequence[BenchJob]) -> None:
        self._stack = ExitStack()
        self._worlds: list[_World] = []
        try:
            folder = self._stack.enter_context(temporary_folder())
            for number, job in enumerate(jobs):
                world = _World(job, folder / str(number))
                self._stack.callback(world.close)
                self._worlds.append(world)
            self.firsts: list[First] = sorted(
                (First(**first) for world in self._worlds for first in world.take_firsts()),
                key=lambda first: first.rank,
            )
            self.num_steps = LEAST_STEPS
            self.num_steps = steps_of_turn(self.take_turn())
        except BaseException:
            self.close()
            raise

    def take_turn(self) -> list[BenchTurn]:
        """Let the processes take as many steps as make a turn; return the turn of each.

        Raises:
            LanewiseError: what the first failing process said.
        """
        for world in self._worlds:
            world.send(self.num_steps)
        return [BenchTurn(**turn) for world in self._worlds for turn in world.receive()]

    def dismiss(self) -> None:
        """Tell the processes to end, without waiting for them."""
        for world in self._worlds:
            world.dismiss()

    def close(self) -> None:
        """End the processes."""
        self.dismiss()
        self._stack.close()


@final
class _World:
    """The processes of one job, with a connection to each."""

    def __init__(self, job: BenchJob, address: Path) -> None:
        """Check the job, and start its processes."""
        check_here(job)
        self._job = BenchJob(job.config, address=address)
        self._address = address
        self._num_processes = job.config.distributed.num_processes or 1
        self._listener = listen(address, self._num_processes)
        self._connections: list[Connection[Any, Any]] = []
        self._failure: LanewiseError | None = None
        self._thread = Thread(target=self._launch, name=address.name, daemon=True)
        self._thread.start()

    def _launch(self) -> None:
        """Run the job; at its end, connect in place of processes that failed and do not."""
        try:
            launch_unseen(self._job, self._num_processes)
        except LanewiseError as error:
            self._failure = error
        finally:
            with suppress(OSError):  # all have connected, and nobody listens any more
                for _ in range(self._num_processes):
                    connect(self._address).close()

    def take_firsts(self) -> list[Any]:
        """Wait until every process has taken its first steps, and return what it found."""
        for _ in range(self._num_processes):
            self._connections.append(accept(self._listener))
        return self.receive()

    def send(self, num_steps: int) -> None:
        """Tell every process to train a turn."""
        with suppress(OSError):  # `receive` says why
            for connection in self._connections:
                send(connection, num_steps)

    def receive(self) -> list[Any]:
        """Return what every process has to say."""
        try:
            return [receive(connection) for connection in self._connections]
        except (EOFError, OSError):
            self._thread.join()
            raise self._failure or LaunchError("a process ended before its turn.") from None

    def dismiss(self) -> None:
        """Let the processes end: without a connection they have nothing left to do."""
        for connection in self._connections:
            connection.close()
        self._listener.close()

    def close(self) -> None:
        """Wait for the end of the processes, but not for ever."""
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive():
            end_servers()
            self._thread.join()


def start(row: BenchRow, jobs: Callable[[], Sequence[BenchJob]]) -> WarmMode | None:
    """Start the processes of a row; None where they fail, which the row notes.

    Args:
        row: of these processes.
        jobs: returns the job of each of their worlds.
    """
    try:
        mode = WarmMode(jobs())
    except LanewiseError as error:
        row.failure = text_of(error)
        return None
    row.firsts = mode.firsts
    return mode


def take_rounds(modes: Mapping[BenchRow, WarmMode], end: float, show: Show) -> None:
    """Let the modes take turns until all rows are steady, or the time is over.

    Args:
        modes: by their rows, which note the turns, or why a mode failed.
        end: of the time, by `time.monotonic`; there are always enough rounds to tell how much they differ.
        show: see `Show`.
    """
    turns = {row: partial(_take_turn, row, mode) for row, mode in modes.items()}
    for number, _ in enumerate(take_turns(turns), start=1):
        rows = [row for row in modes if not row.failure]
        num_noisy = sum(not row.is_steady for row in rows)
        show(f"round {number}: {num_noisy} of {len(rows)} rows are noisy")
        if not num_noisy or (number >= LEAST_ROUNDS and time.monotonic() > end):
            return


def _take_turn(row: BenchRow, mode: WarmMode) -> None:
    if row.failure:
        return
    try:
        row.rounds.append(mode.take_turn())
    except LanewiseError as error:
        row.failure = text_of(error)
