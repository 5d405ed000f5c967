"""Starts the workers of one machine as forks of a server, and watches them.

What starts them over SSH or through a scheduler is another function of `Workers`, in a file of its own.
"""

import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from lanewise.errors import LaunchError
from lanewise.launch.failure import ERROR_FILE_VARIABLE, first_failure
from lanewise.launch.fork_server import Fork, fork_server

_ADDRESS = "127.0.0.1"
_SECONDS_TO_FAIL = 0.1
"""How long workers may go on when one has failed. The others fail at their next collective, and log it."""
_SECONDS_TO_END = 30.0
"""How long workers may take to end after a signal."""


Streams = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes of one world."""

    num_processes: int
    module: str
    """Each worker does what `python -m MODULE ARGUMENTS` does, in the working directory of this process."""
    arguments: Sequence[str]
    variables: Mapping[str, str]
    """Added to the environment. Torchrun's variables tell each worker its rank."""
    streams: Streams
    """File descriptors of this process that become the standard streams of every worker."""
    folder: Path
    """Where workers write why they failed. The caller removes it."""
    max_restarts: int
    """How often all of them are started again when one fails."""
    signals: Sequence[signal.Signals]
    """The signals, besides SIGINT, that end the workers and the launch."""


def launch_workers(workers: Workers) -> None:
    """Run the workers, and wait for all of them.

    What they print goes to this process's standard streams. When this call returns or raises, or when this
    process is killed, all of them have ended.

    Raises:
        LaunchError: what the first failing worker said.
        KeyboardInterrupt: on SIGINT; SystemExit: on the other signals that end the launch.
    """
    import torch.distributed as dist

    listener = socket.create_server((_ADDRESS, 0))  # torch's own would listen on every address
    port = listener.getsockname()[1]
    # The workers meet here, as they do at the store of torchrun's agent.
    store = dist.TCPStore(
        _ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    variables = {
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(workers.num_processes),
        "LOCAL_WORLD_SIZE": str(workers.num_processes),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_MAX_RESTARTS": str(workers.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }
    with _ending_on(workers.signals):
        for attempt in range(workers.max_restarts + 1):
            try:
                _run(workers, {**variables, "TORCHELASTIC_RESTART_COUNT": str(attempt)})
                break
            except LaunchError:
                if attempt == workers.max_restarts:
                    raise


def _run(workers: Workers, variables: dict[str, str]) -> None:
    """Start all workers once, and wait for all of them, or for the first one that fails."""
    server = fork_server(workers.variables)
    environment = {**os.environ, **workers.variables, **variables}
    attempt = variables["TORCHELASTIC_RESTART_COUNT"]
    files = [workers.folder / f"error-{attempt}-{rank}" for rank in range(workers.num_processes)]
    forks: list[Fork] = []
    try:
        for rank, file in enumerate(files):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE_VARIABLE: str(file)}
            fork = server.run(
                workers.module, workers.arguments, environment=environment | of_rank, streams=workers.streams
            )
            forks.append(fork)
        while None in (codes := [fork.poll() for fork in forks]) and not any(codes):
            wait([fork.connection for fork, code in zip(forks, codes, strict=True) if code is None])
        if any(codes):
            time.sleep(_SECONDS_TO_FAIL)
            server.require_running()
            raise first_failure([fork.poll() for fork in forks], files)
    except KeyboardInterrupt:
        _end(forks, signal.SIGINT)
        raise
    finally:
        _end(forks, signal.SIGKILL)


def _end(forks: Sequence[Fork], sign: signal.Signals) -> None:
    """Send a signal to all workers, and wait for their end, but not for ever."""
    for fork in forks:
        fork.send_signal(sign)
    deadline = time.monotonic() + _SECONDS_TO_END
    for fork in forks:
        fork.wait(max(0.0, deadline - time.monotonic()))


@contextmanager
def _ending_on(signals: Sequence[signal.Signals]) -> Iterator[None]:
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
