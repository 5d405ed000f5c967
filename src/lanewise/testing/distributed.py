"""Runs a function in several real processes that form a gloo world on this machine."""

import os
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle

from lanewise.launch import Fork, fork_client
from lanewise.launch.scratch import scratch_folder


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    one_machine: bool = True,
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Call `function(world, *args)` in `world_size` new processes.

    The processes are forked from a server that has imported torch but computed nothing, so that they start in
    a few hundredths of a second, each with one intra-op thread.

    Args:
        function: found by its module and name, unless it is of the script that is running.
        world_size: how many processes; with 1 the function gets a `LocalWorld`.
        args: picklable.
        device: the device of every process; gloo lets several share one GPU.
        one_machine: whether the processes share memory; False: as if each were on a machine of its own.
        timeout_seconds: after this the processes are killed.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: the traceback of the first rank that failed.
        TimeoutError: if some rank did not end in time.
    """
    # A function of a script that is running travels as a whole: the workers run another script.
    call = pickle.dumps((sys.path, cloudpickle.dumps((function, args)), world_size, device, one_machine))
    server = fork_client({})
    with scratch_folder() as folder:
        (folder / "call").write_bytes(call)
        forks: list[Fork] = []
        try:
            for rank in range(world_size):
                arguments = [str(folder), str(rank)]
                forks.append(server.run("lanewise.testing.worker", arguments, environment=os.environ))
            return _collect(forks, folder, timeout_seconds)
        finally:
            for fork in forks:
                fork.kill()


def _collect(forks: list[Fork], folder: Path, timeout_seconds: float) -> list[Any]:
    """Wait for what every rank returns, or for the first one that fails."""
    deadline = time.monotonic() + timeout_seconds
    while None in (codes := [fork.poll() for fork in forks]) and not any(codes):
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not wait([forks[rank].connection for rank in running], max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"ranks {running} did not end within {timeout_seconds} s")
    values, failures = [], []
    for rank, code in enumerate(codes):
        file = folder / f"result-{rank}"
        if file.exists():
            seconds, is_error, value = pickle.loads(file.read_bytes())  # noqa: S301 - from our own process
            values.append(value)
            failures += [(seconds, rank, value)] if is_error else []
        elif code is not None:
            raise RuntimeError(f"rank {rank} ended without a result")
    if failures:  # the first one: others may have lost their connection to it
        _, rank, value = min(failures)
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return values
