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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, NoReturn

from lanewise.errors import LaunchError
from lanewise.launch.fork_server import Fork, fork_server

if TYPE_CHECKING:
    from lanewise.watch.channel import Channel
    from lanewise.watch.failure import Failure

_ADDRESS = "127.0.0.1"
_SECONDS_TO_FAIL = 0.1
"""How long workers may go on when one has failed. The others fail at their next collective, and log it."""
_SECONDS_TO_END = 5.0
"""How long workers may take to end after a signal."""
_SECONDS_BETWEEN_LOOKS = 0.5


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
    max_restarts: int
    """How often all of them are started again when one fails."""
    signals: Sequence[signal.Signals]
    """The signals, besides SIGINT, that end the workers and the launch."""


def launch_workers(workers: Workers) -> None:
    """Run the workers, and wait for all of them.

    What they print goes to this process's standard streams. When this call returns or raises, or when this
    process is killed, all of them have ended. Where they are started again, one line says why; a user's
    mistake, or the same error at the same step twice, ends the launch instead.

    Raises:
        LaunchError: what the first failing worker said.
        KeyboardInterrupt: on SIGINT; SystemExit: on the other signals that end the launch.
    """
    before: Failure | None = None
    with _ending_on(workers.signals):
        for num_restarts in range(workers.max_restarts + 1):
            failure = _run(workers, num_restarts)
            if failure is None:
                return
            if num_restarts == workers.max_restarts or failure.is_final(before):
                raise LaunchError(str(failure), failure.exit_code)
            before = failure
            text = f"starting again, {num_restarts + 1} of {workers.max_restarts} times: {failure.summary}\n"
            with suppress(OSError):  # nobody listens
                os.write(workers.streams[2], text.encode(errors="backslashreplace"))


def _run(workers: Workers, num_restarts: int) -> "Failure | None":
    """Start all workers once, and wait for all of them; return the first failure, if one fails."""
    import torch.distributed as dist

    from lanewise.watch.channel import Channel
    from lanewise.watch.stall import Silence
    from lanewise.watch.store import TimedStore
    from lanewise.watch.watch import LAUNCHER_SHOWS_VARIABLE

    server = fork_server(workers.variables)
    listener = socket.create_server((_ADDRESS, 0))  # torch's own would listen on every address
    port = listener.getsockname()[1]
    # The workers meet here, as they do at the store of torchrun's agent.
    store = dist.TCPStore(
        _ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    timed = TimedStore(store, f"{_ADDRESS}:{port}, which this process keeps,")
    channel = Channel(timed, workers.num_processes)
    environment = {
        **os.environ,
        **workers.variables,
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(workers.num_processes),
        "LOCAL_WORLD_SIZE": str(workers.num_processes),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(workers.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        LAUNCHER_SHOWS_VARIABLE: str(True),
    }
    forks: list[Fork] = []
    silence = Silence(channel)
    try:
        for rank in range(workers.num_processes):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            forks.append(
                server.run(
                    workers.module,
                    workers.arguments,
                    environment=environment | of_rank,
                    streams=workers.streams,
                )
            )
        while None in (codes := [fork.poll() for fork in forks]) and not any(codes):
            running = [fork.connection for fork, code in zip(forks, codes, strict=True) if code is None]
            if not wait(running, _SECONDS_BETWEEN_LOOKS) and (stall := silence.look(_SECONDS_BETWEEN_LOOKS)):
                return stall
        if not any(codes):
            return None
        time.sleep(_SECONDS_TO_FAIL)
        server.require_running()
        return _first_failure(channel, [fork.poll() for fork in forks])
    except KeyboardInterrupt:
        _end(forks, signal.SIGINT)
        raise
    finally:
        _end(forks, signal.SIGKILL)
        timed.close()


def _first_failure(channel: "Channel", codes: Sequence[int | None]) -> "Failure":
    """Return the first failure; of a worker that said nothing, its exit code is known here."""
    from lanewise.watch.channel import SILENCE, failure_of

    first = channel.first()
    if first is not None and (first.kind != SILENCE or not codes[first.rank]):
        return first
    # Those that a signal ended come before others, which missed them.
    code, rank = min((code, rank) for rank, code in enumerate(codes) if code)
    if first is not None:
        code, rank = codes[first.rank] or 0, first.rank
    beat = channel.beats().get(rank)
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
