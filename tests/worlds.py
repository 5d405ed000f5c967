"""Keeps the worlds of a test file: one set of processes for each size runs the functions that tests send.

A world that is forked for one function costs more than most functions: the copies of the pages that each rank
writes, the import of the test's module, and what torch does once in a process. Here that is paid once a file.

Before each function a rank puts back what a test may have changed: the working directory, the environment,
random states, the switches of torch, warnings, the handlers and levels of logs, signal handlers. A world in
which some ranks wait for one that failed, or that did not end in time, is killed, and the next function gets
a new one. What looks at a process as it starts uses `run_distributed` of `lanewise.testing`.
"""

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle

from lanewise.launch import Fork, fork_client
from lanewise.testing import run_distributed as run_fresh
from tests.patience import patient

PATIENCE = patient(1.0)
"""How long the other ranks may take to fail after the first, before they count as waiting for it."""


class BrokenWorldError(RuntimeError):
    """A world is of no use any more."""


class KeptWorld:
    """Processes that run one function after another.

    Args:
        world_size: how many.
        folder: an empty one, for what they write.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self.num_calls = 0
        self._folder = folder
        self._sockets: list[socket.socket] = []
        self._forks: list[Fork] = []
        for rank in range(world_size):
            ours, theirs = socket.socketpair()
            with theirs:
                self._forks.append(
                    fork_client({}).run(
                        "tests.world_worker",
                        [str(folder), str(rank), str(world_size)],
                        environment=os.environ,
                        streams=(theirs.fileno(), 1, 2),
                    )
                )
            self._sockets.append(ours)

    def run(self, call: bytes, timeout_seconds: float) -> tuple[list[Any], str | None]:
        """Let each rank call a function; return what they returned, and how the first that failed did.

        Raises:
            TimeoutError: if some rank did not end in time.
            BrokenWorldError: some ranks wait for one that failed, or one has ended: the world is of no use.
        """
        self.num_calls += 1
        (self._folder / f"call-{self.num_calls}").write_bytes(call)
        for ours in self._sockets:
            ours.sendall(b"%d\n" % self.num_calls)
        deadline = time.monotonic() + timeout_seconds
        waiting = dict(zip(self._sockets, range(self.world_size), strict=True))
        has_failed = False
        while waiting:
            seconds = deadline - time.monotonic()
            ready: list[Any] = wait(
                list(waiting), max(0.0, min(seconds, PATIENCE) if has_failed else seconds)
            )
            if not ready and has_failed:
                break
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not end within {timeout_seconds} s")
            for one in ready:
                rank = waiting.pop(one)
                if (word := one.recv(1)) == b"":
                    raise BrokenWorldError(f"rank {rank} ended without a result")
                has_failed |= word != b"+"
        values, failures = self._results()
        # The first one: others may have lost their connection to it.
        failure = f"rank {min(failures)[1]} failed:\n{min(failures)[2]}" if failures else None
        if waiting:
            raise BrokenWorldError(failure)
        return values, failure

    def end(self) -> None:
        """Kill the processes."""
        for fork in self._forks:
            fork.kill()
        for ours in self._sockets:
            ours.close()

    def _results(self) -> tuple[list[Any], list[tuple[float, int, str]]]:
        values, failures = [], []
        for rank in range(self.world_size):
            file = self._folder / f"result-{self.num_calls}-{rank}"
            if file.exists():
                seconds, is_error, value = pickle.loads(file.read_bytes())
                values.append(value)
                failures += [(seconds, rank, value)] if is_error else []
        return values, failures


_kept: dict[int, tuple[KeptWorld, "TemporaryDirectory[str]"]] = {}


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    one_machine: bool = True,
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Do what `lanewise.testing.run_distributed` does, in the world of that size that this file keeps."""
    if device != "cpu":
        options = {"device": device, "one_machine": one_machine, "timeout_seconds": timeout_seconds}
        return run_fresh(function, world_size, *args, **options)
    place = (sys.path, str(Path.cwd()), dict(os.environ))
    call = pickle.dumps((*place, cloudpickle.dumps((function, args)), one_machine))
    if world_size not in _kept:
        scratch = TemporaryDirectory(prefix="world-")
        _kept[world_size] = (KeptWorld(world_size, Path(scratch.name)), scratch)
    try:
        values, failure = _kept[world_size][0].run(call, timeout_seconds)
    except BaseException:
        _end(world_size)
        raise
    if failure is not None:
        raise RuntimeError(failure)
    return values


def end_worlds() -> None:
    """End all worlds that are kept."""
    for world_size in list(_kept):
        _end(world_size)


def _end(world_size: int) -> None:
    world, scratch = _kept.pop(world_size)
    world.end()
    scratch.cleanup()
