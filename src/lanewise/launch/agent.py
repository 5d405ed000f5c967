"""Runs the workers of one host as forks of a server, and watches them."""

import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

from lanewise.launch.fork_client import SECONDS_BETWEEN_CHECKS, Fork, fork_client
from lanewise.processes.watch.channel import STORE_LOST, Beat, Channel, failure_of
from lanewise.processes.watch.failure import (
    ERROR_FILE_VARIABLE,
    LAUNCHER_SHOWS_VARIABLE,
    SILENCE,
    Failure,
    recorded_failure,
)
from lanewise.processes.watch.stall import Silence
from lanewise.processes.watch.store import StoreLostError, TimedStore

LOCALHOST = "127.0.0.1"
LAUNCH_VARIABLE = "LANEWISE_LAUNCH"
"""Environment variable in which a launcher says as JSON which launch this is, and what its hosts are."""
_SECONDS_TO_FAIL = 0.1
"""How long workers may go on when one has failed. The others fail at their next collective, and log it."""
_SECONDS_TO_JOIN = 60.0
_SECONDS_TO_END = 5.0
"""How long workers may take to end after a signal."""

Streams = tuple[int, int, int]
"""File descriptors of this process that become the standard streams of a worker."""


@final
class JobFiles:
    """What a launcher and its workers leave for each other on a host, beside the file of the job.

    Args:
        job: that file, or any of those beside it.
    """

    def __init__(self, job: Path) -> None:
        self.job = job.with_suffix("")
        """What the workers do; every one of them reads it."""
        self.result = job.with_suffix(".result")
        """What came of it; rank 0 writes it."""
        self.stop = job.with_suffix(".stop")
        """It is there as soon as the workers shall save and stop."""
        self.begun = job.with_suffix(".begun")
        """It is there as soon as they train."""

    def error(self, rank: int) -> Path:
        """Why a rank failed; the rank writes it, as the store may be lost to it."""
        return self.job.with_suffix(f".error-{rank}")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What the processes of a world do."""

    module: str
    """Each worker does what `python -m MODULE FILE` does, where FILE is that of the job."""
    variables: Mapping[str, str]
    """Added to the environment. Torchrun's variables tell each worker its rank."""
    stop_variable: str | None
    """The variable that tells the workers for which file to look, if they can stop."""
    max_restarts: int
    """How often all of them are started again when one fails."""
    signals: Sequence[signal.Signals]
    """The signals, besides SIGINT, that end the workers and the launch."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the workers of a host stand in their world."""

    num_processes: int
    world_size: int
    first_rank: int = 0
    node: int = 0
    """The number of the host."""
    address: str = LOCALHOST
    """The address of the first host, whose agent keeps the store."""
    num_restarts: int = 0


def open_store(address: str) -> tuple[TimedStore, int]:
    """Open the store at which the workers meet, as at that of torchrun's agent; return it and its port."""
    import torch.distributed as dist

    listener = socket.create_server((address, 0))  # torch's own would listen on every address
    port = listener.getsockname()[1]
    number = listener.detach()
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=number)
    return TimedStore(store, f"{address}:{port}, which this process keeps,"), port


def join_store(address: str, port: int) -> TimedStore:
    """Return the store that the agent of another host has opened."""
    import torch.distributed as dist

    timeout = timedelta(seconds=_SECONDS_TO_JOIN)
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return TimedStore(store, f"{address}:{port}, which the first host keeps,")


def run_workers(
    workers: Workers,
    place: Place,
    files: JobFiles,
    store: TimedStore,
    port: int,
    streams_of: Callable[[int], Streams],
) -> Failure | None:
    """Start the workers of this host once, and wait for all of them.

    When this call returns or raises, or when this process is killed, all of them have ended.

    Args:
        workers: what they do.
        place: their ranks.
        files: those of this host.
        store: that of the world; closed at the end.
        port: of the store.
        streams_of: returns the standard streams for a local rank.

    Returns:
        The first failure of the world, if a worker of this host fails.
    """
    server = fork_client(workers.variables)
    channel = Channel(store, place.world_size)
    environment = {
        **os.environ,
        **workers.variables,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.num_processes),
        "GROUP_RANK": str(place.node),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": str(place.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(workers.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        LAUNCHER_SHOWS_VARIABLE: str(True),
    }
    if workers.stop_variable is not None:
        environment[workers.stop_variable] = str(files.stop)
    forks: list[Fork] = []
    silence = Silence(channel)
    try:
        for local_rank in range(place.num_processes):
            rank = place.first_rank + local_rank
            files.error(rank).unlink(missing_ok=True)  # of an earlier start
            of_rank = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                ERROR_FILE_VARIABLE: str(files.error(rank)),
            }
            forks.append(
                server.run(
                    workers.module,
                    [str(files.job)],
                    environment=environment | of_rank,
                    streams=streams_of(local_rank),
                )
            )
        while None in (codes := [fork.poll() for fork in forks]) and not any(codes):
            running = [fork.connection for fork, code in zip(forks, codes, strict=True) if code is None]
            is_quiet = not server.wait(running, forks)
            if is_quiet and place.node == 0 and (stall := silence.check(SECONDS_BETWEEN_CHECKS)):
                return stall
        if not any(codes):
            return None
        time.sleep(_SECONDS_TO_FAIL)
        server.require_running()
        return _first_failure(channel, dict(enumerate(forks, place.first_rank)), files)
    except KeyboardInterrupt:
        _end(forks, signal.SIGINT)
        raise
    finally:
        _end(forks, signal.SIGKILL)
        store.close()


def _first_failure(channel: Channel, forks: Mapping[int, Fork], files: JobFiles) -> Failure:
    """Return the first failure; of a worker that could not tell it, its file or its exit code is known here.

    Args:
        channel: of the world.
        forks: the workers of this host, by rank.
        files: of this host.
    """
    codes = {rank: fork.poll() for rank, fork in forks.items()}
    recorded = {rank: failure for rank in codes if (failure := recorded_failure(files.error(rank)))}
    try:
        first = channel.first()
        if first is not None and first.kind == SILENCE and first.rank in forks:
            # Others see the end of its first thread, and the exit code comes after that of its last one.
            codes[first.rank] = forks[first.rank].wait(_SECONDS_TO_END)
        if first is not None and (first.kind != SILENCE or not codes.get(first.rank)):
            return first
        # Those that a signal ended come before others, which missed them.
        rank = min((code, rank) for rank, code in codes.items() if code)[1] if first is None else first.rank
        failure = recorded.get(rank) or _failure_of(rank, codes[rank] or 0, channel.beats().get(rank))
        return channel.report(failure) if first is None else failure
    except StoreLostError as lost:  # with the host that keeps it, or the way to it
        known = sorted(recorded.values(), key=lambda failure: failure.kind == STORE_LOST)
        return known[0] if known else Failure.of(lost, min(codes))


def _failure_of(rank: int, code: int, beat: Beat | None) -> Failure:
    """Describe the end of a worker that said nothing.

    Args:
        rank: of the worker.
        code: its exit code.
        beat: what it did last.
    """
    last = "" if beat is None else f" {beat.last}".rstrip()
    if code < 0:
        why = ", often by the kernel for want of memory: see dmesg" if code == -signal.SIGKILL else ""
        text = f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name}){why}.{last}".rstrip()
        return failure_of(rank, beat, signal.Signals(-code).name, text)
    text = f"rank {rank} ended with exit code {code}; its log may say why.{last}".rstrip()
    return failure_of(rank, beat, "exit", text, exit_code=code)


def _end(forks: Sequence[Fork], sign: signal.Signals) -> None:
    """Send a signal to all workers, and wait for their end, but not for ever."""
    for fork in forks:
        fork.send_signal(sign)
    deadline = time.monotonic() + _SECONDS_TO_END
    for fork in forks:
        fork.wait(max(0.0, deadline - time.monotonic()))
