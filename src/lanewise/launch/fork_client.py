"""Starts processes that have everything imported already: asks a server for forks, which is `fork_server`."""

import atexit
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import final

from lanewise.errors import LaunchError
from lanewise.launch import fork_server
from lanewise.processes.die_with_parent import end_session
from lanewise.processes.watch.process import ENDED, STOPPED, process_table, state_of

READ_AT_START = (
    "PYTHON",
    "LD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "MALLOC_",
    "CUBLAS_",
    "TORCH_",
    "TORCHDYNAMO_",
)
"""What an interpreter or a library reads once, when it starts: a server serves one set of values of these."""

PRELOAD = (
    "torch",
    "torch._dynamo",  # which every optimizer imports, and which takes as long as torch itself
    "lanewise.engine.engine",
    "lanewise.engine.run.resume",
)
"""What every worker needs."""

_GONE = (
    "the process that workers are forked from was killed, often by the kernel for want of memory: see dmesg."
)

SECONDS_BETWEEN_CHECKS = 0.5
_MOST_CHECKS = 10
"""How often it is looked at a server that is stopped, and has something to tell, before it is killed."""
_SECONDS_TO_END = 1.0
"""How long a server may take to end what its forks have started; one that is stopped takes for ever."""

_servers: dict[frozenset[tuple[str, str]], "ForkClient"] = {}
_lock = threading.Lock()


def fork_client(variables: Mapping[str, str]) -> "ForkClient":
    """Return the client of the server for an environment, started if none runs; it ends with this process.

    This call does not wait for the server's imports.

    Args:
        variables: added to the environment, such as `pinned_variables`.
    """
    environment = {**os.environ, **variables}
    with _lock:
        key = _read_at_start(environment)
        if fork_server.channel is not None and key == _read_at_start(fork_server.started_with):
            return ForkClient(fork_server.channel)
        server = _servers.get(key)
        if server is None or not server.is_running():
            server = _servers[key] = ForkClient.start(environment, PRELOAD)
        return server


def end_servers() -> None:
    """End all servers that this process started, and every fork with them."""
    with _lock:
        for server in _servers.values():
            server.end()


def _read_at_start(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in environment.items() if name.startswith(READ_AT_START))


@final
class ForkClient:
    """The client of a server.

    Args:
        channel: takes requests.
        process: the server, where this process started it.
    """

    def __init__(self, channel: socket.socket, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._channel = channel
        self._process = process
        self._parent_pid = os.getpid()
        self._imported: set[str] = set()
        self._num_checks = 0
        self._has_forked = False

    @classmethod
    def start(cls, environment: Mapping[str, str], preload: Sequence[str]) -> "ForkClient":
        """Start a server, and let it import modules."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        numbers = (theirs.fileno(), ours.fileno(), os.getpid())
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lanewise.launch", *map(str, numbers), *preload],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), ours.fileno()),
                start_new_session=True,
            )
        server = cls(ours, process)
        atexit.register(server.end)
        return server

    @property
    def pid(self) -> int:
        """The process id of the server, which is the parent of this process where that did not start it."""
        return os.getppid() if self._process is None else self._process.pid

    def is_running(self) -> bool:
        """Tell whether the server lives."""
        return self._process is None or self._process.poll() is None

    def require_running(self) -> None:
        """Do nothing while the server lives.

        Raises:
            LaunchError: it has ended, and with it every fork.
        """
        if not self.is_running():
            raise LaunchError(_GONE)

    def wait(self, connections: Sequence[socket.socket], forks: "Sequence[Fork]" = ()) -> bool:
        """Wait a moment for word of the server; return whether there is some.

        Args:
            connections: through which it may come.
            forks: those whose ends are waited for; none where the server must say something in any case.

        Raises:
            LaunchError: the server has long been stopped, and so does not say what it should. It is killed.
        """
        if wait(connections, SECONDS_BETWEEN_CHECKS):
            self._num_checks = 0
            return True
        table = process_table()
        owes = not forks or any(fork.poll() is None and state_of(fork.pid, table) == ENDED for fork in forks)
        is_stopped = owes and state_of(self.pid, table) == STOPPED
        self._num_checks = self._num_checks + 1 if is_stopped else 0
        if self._num_checks > _MOST_CHECKS:
            self.end()
            raise LaunchError(
                f"the process that workers are forked from (process {self.pid}), {STOPPED}, has not said how "
                "they began or ended. Start the run again: --resume continues from its newest checkpoint."
            )
        return False

    def preload(self, *modules: str) -> None:
        """Let the server import modules before it forks again. They must compute nothing while imported."""
        new = [name for name in modules if name not in self._imported]
        if new:
            self._imported.update(new)
            with suppress(OSError):  # it has ended, which the next fork reports
                self._channel.send(b" ".join([fork_server.IMPORT, *(name.encode() for name in new)]))

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: str | None = None,
        streams: tuple[int, int, int] = (0, 1, 2),
    ) -> "Fork":
        """Start a process that does what `python -m MODULE ARGUMENTS` does.

        Args:
            module: as after `-m`.
            arguments: what follows.
            environment: the whole environment of the process.
            cwd: its working directory; None: that of this process.
            streams: file descriptors of this process that become its standard streams.

        Raises:
            LaunchError: the server has ended.
        """
        ours, theirs = socket.socketpair()
        program = fork_server.Program(module, arguments, dict(environment), cwd or str(Path.cwd()))
        try:
            with theirs:
                self._has_forked = True
                socket.send_fds(self._channel, [fork_server.RUN], [theirs.fileno(), *streams])
            while not self.wait([ours]):
                pass  # it imports
            fork = Fork(ours)
            ours.sendall(f"{json.dumps(program)}\n".encode())
        except LaunchError:
            ours.close()
            raise
        except OSError:
            ours.close()
            raise LaunchError(_GONE) from None
        return fork

    def end(self) -> None:
        """End the server, and every fork with it; does nothing in a fork of the process that started it."""
        if self._process is not None and os.getpid() == self._parent_pid:
            if self._has_forked:  # else it may import, which takes longer
                with suppress(OSError, subprocess.TimeoutExpired):
                    self._channel.send(fork_server.END, socket.MSG_DONTWAIT)
                    self._process.wait(_SECONDS_TO_END)
            self._process.kill()
            self._process.wait()
            self._channel.close()


@final
class Fork:
    """A process that a server forked. It is killed when this object, or this process, goes.

    Args:
        connection: through which the server tells its process id and exit code; so it becomes readable when
            the process ends.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._returncode: int | None = None
        pid = self._receive()
        if pid is None:
            raise ConnectionResetError
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the process runs."""
        if self._returncode is None and wait([self.connection], 0):
            code = self._receive()
            if code is None:  # the server has ended, and the fork with it
                end_session(self.pid)
            self._returncode = -signal.SIGKILL if code is None else code
            self.connection.close()
        return self._returncode

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for the end, and return what `poll` returns."""
        deadline = time.monotonic() + timeout_seconds
        while self.poll() is None and (left := deadline - time.monotonic()) > 0:
            wait([self.connection], None if math.isinf(left) else left)
        return self._returncode

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait(math.inf)

    def send_signal(self, sign: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sign)

    def _receive(self) -> int | None:
        """Receive a number; None where the server has ended."""
        with suppress(ConnectionResetError):
            if received := self.connection.recv(fork_server.NUMBER.size):
                return int(fork_server.NUMBER.unpack(received)[0])
        return None
