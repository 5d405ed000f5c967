"""Runs a function in several real processes that form a gloo world on this machine."""

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from lanewise.jobs.scratch import scratch_folder
from lanewise.lifeline import die_with_parent
from lanewise.world.world import GroupWorld, LocalWorld, World


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Call `function(world, *args)` in `world_size` new processes.

    The processes are forked from a server that has imported torch but computed nothing, so that they start in
    a few hundredths of a second, each with one intra-op thread.

    Args:
        function: found by its module and name, as pickle does.
        world_size: how many processes; with 1 the function gets a `LocalWorld`.
        args: picklable.
        device: the device of every process; gloo lets several share one GPU.
        timeout_seconds: after this the processes are killed.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: the traceback of the first rank that failed.
        TimeoutError: if some rank did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo: every optimizer imports it, which takes a second.
    context.set_forkserver_preload(["torch", "torch._dynamo", "lanewise.testing.distributed"])
    with scratch_folder() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        call = pickle.dumps((function, args, device))
        processes = [
            context.Process(target=_run, args=(rank, world_size, f"{folder}/store", call, send), daemon=False)
            for rank, (_, send) in enumerate(pipes)
        ]
        try:
            for process, (_, send) in zip(processes, pipes, strict=True):
                process.start()
                send.close()
            return _collect([receive for receive, _ in pipes], timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[Any]:
    """Wait for what every rank returns, or for the first one that fails."""
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise TimeoutError(f"ranks {missing} did not end within {timeout_seconds} s")
        failures: list[tuple[float, int, str]] = []
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ended, is_error, value = pickle.loads(pipes[rank].recv_bytes())  # noqa: S301 - from our own process
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a result") from None
            if is_error:
                failures.append((ended, rank, value))
            results[rank] = value
        if failures:  # the first one: others may have lost their connection to it
            _, rank, value = min(failures)
            raise RuntimeError(f"rank {rank} failed:\n{value}")
    return [results[rank] for rank in range(len(pipes))]


def _run(rank: int, world_size: int, store: str, call: bytes, pipe: Connection) -> None:
    """Join the world, call the function and send back what it returned or why it failed."""
    die_with_parent()
    torch.set_num_threads(1)
    # Loader workers start as in any other process, not each from one more server that has imported nothing.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    try:
        function, args, device = pickle.loads(call)  # noqa: S301 - from our own process
        world: World = LocalWorld(torch.device(device))
        if world_size > 1:
            meeting = FileStore(store, world_size)
            dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size)
            world = GroupWorld(torch.device(device), meeting)
            dist.barrier()  # else a rank that ends at once hangs up on one that is still connecting
        result = pickle.dumps((time.monotonic(), False, function(world, *args)))
        world.close()
    except Exception:  # noqa: BLE001 - shown by the caller
        result = pickle.dumps((time.monotonic(), True, traceback.format_exc()))
    pipe.send_bytes(result)
