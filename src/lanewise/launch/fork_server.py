"""`python -m lanewise.launch`: imports what workers need, computes nothing, and forks each worker.

A fork does what `python -m MODULE ARGUMENTS` does, with the imports already paid. Everything else is as if
the client had started it: environment, working directory and standard streams are the client's.

    client                              server                          fork
    ------                              ------                          ----
    "run", its standard streams,   ->   forks
      and one end of a socket                                           reads from the socket what to run
                                   <-   the process id
                                   <-   the exit code                   ends
    closes the socket, or ends          kills the fork
    "import" and names             ->   imports them
    "end", or ends                      kills all forks, and ends

With a fork that fails or is killed, the other processes of its session end: what the user's code started.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, final

from lanewise.processes.die_with_parent import die_with_parent, end_session, find_command_line

RUN, IMPORT, END = b"run", b"import", b"end"
NUMBER = struct.Struct("!i")
"""How the process id and the exit code are written; of a process that a signal ended it is negative."""
_MAX_MESSAGE_BYTES = 65536

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""They may be sent to every process of a run. The server does not act on them."""
_SECONDS_BETWEEN_CHECKS = 0.5
"""How often it is looked whether the parent lives, where the kernel does not tell."""

channel: socket.socket | None = None
"""A fork has here where the server takes requests, and so can launch workers itself; the server has None."""
started_with: Mapping[str, str] = {}
"""A fork has here the environment that the server was started with."""


class Program(NamedTuple):
    """What a fork does: the same as `python -m MODULE ARGUMENTS`. It is sent as a line of JSON."""

    module: str
    arguments: Sequence[str]
    variables: Mapping[str, str]
    """The whole environment."""
    cwd: str


def main() -> None:
    """Serve until the parent ends; in a fork, run its program."""
    global channel, started_with
    requests, client, parent_pid = (int(argument) for argument in sys.argv[1:4])
    for number in (requests, client):
        os.set_inheritable(number, False)
    handlers = {sign: signal.signal(sign, signal.SIG_IGN) for sign in _IGNORED}
    environment = dict(os.environ)
    _import(sys.argv[4:])
    program = _Server(socket.socket(fileno=requests), parent_pid, handlers).serve()
    channel, started_with = socket.socket(fileno=client), environment
    _end(_exit_code_of(program))


@final
class _Server:
    """Takes requests, and keeps an eye on the forks, their clients and the parent.

    Args:
        requests: where they come from.
        parent_pid: the process with which the server ends.
        handlers: those that forks have of the signals which the server ignores.
    """

    def __init__(
        self, requests: socket.socket, parent_pid: int, handlers: Mapping[signal.Signals, Any]
    ) -> None:
        self._requests = requests
        self._parent_pid = parent_pid
        self._handlers = handlers
        self._forks: dict[int, socket.socket] = {}
        """The socket of the client of each fork, by process id."""
        # A child that ends interrupts poll() by a byte in this pipe.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._poll = select.poll()
        for number in (requests.fileno(), self._wake_read):
            self._poll.register(number, select.POLLIN)
        self._parent: int | None = None
        with suppress(AttributeError, OSError):  # not Linux, or an old one
            self._parent = os.pidfd_open(parent_pid)
            self._poll.register(self._parent, select.POLLIN)

    def serve(self) -> Program:
        """Serve for ever; returns in a fork only."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler it would not wake up poll()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while True:
            ready = dict(self._poll.poll(_SECONDS_BETWEEN_CHECKS * 1000 if self._parent is None else None))
            if self._parent in ready or os.getppid() != self._parent_pid:
                self._end()
            if self._wake_read in ready:
                with suppress(BlockingIOError):
                    while os.read(self._wake_read, 4096):
                        pass
                self._reap()
            for pid, client in list(self._forks.items()):
                if client.fileno() in ready:  # it has ended, or closed it
                    os.kill(pid, signal.SIGKILL)
                    self._poll.unregister(client)
            if self._requests.fileno() in ready and (of_fork := self._take()):
                return self._program(of_fork)

    def _take(self) -> socket.socket | None:
        """Do what one message asks for; return the socket of the client in a fork only."""
        message, numbers, _, _ = socket.recv_fds(self._requests, _MAX_MESSAGE_BYTES, 4)
        kind, _, names = message.partition(b" ")
        if kind == END:
            self._end()
        if kind == IMPORT:
            _import(names.decode().split())
            return None
        client, streams = socket.socket(fileno=numbers[0]), numbers[1:]
        server_pid = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)  # none that a fork gets is lost
        pid = os.fork()
        if pid == 0:
            die_with_parent(server_pid)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sign, handler in self._handlers.items():
                signal.signal(sign, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._close()
            _take_streams(streams)
            if numpy := sys.modules.get("numpy.random"):  # which drew its seed when it was imported
                numpy.seed()
            return client
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in streams:
            os.close(number)
        with suppress(BrokenPipeError):
            client.sendall(NUMBER.pack(pid))
        self._forks[pid] = client
        self._poll.register(client, 0)  # its end is told in any case
        return None

    def _program(self, client: socket.socket) -> Program:
        """Read in a fork what it is to do."""
        line = ""
        with client, client.makefile("r", encoding="utf-8") as lines, suppress(ConnectionResetError):
            line = lines.readline()
        if not line:
            os._exit(1)  # the client has ended
        return Program(*json.loads(line))

    def _reap(self) -> None:
        """Tell the clients of forks that ended."""
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if status:
                end_session(pid)
            client = self._forks.pop(pid, None)
            if client is not None:
                with suppress(KeyError):
                    self._poll.unregister(client)
                with suppress(BrokenPipeError):
                    client.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
                client.close()

    def _end(self) -> NoReturn:
        """End with every fork, and with what the forks started."""
        for pid in self._forks:
            os.kill(pid, signal.SIGKILL)
            end_session(pid)
        os._exit(0)

    def _close(self) -> None:
        """Close in a fork what is the server's."""
        for client in self._forks.values():
            client.close()
        self._requests.close()
        for number in (self._wake_read, self._wake_write, self._parent):
            if number is not None:
                os.close(number)


def _exit_code_of(program: Program) -> int:
    """Run a program, and say with which code python would end."""
    try:
        find_command_line()
        os.environ.clear()
        os.environ.update(program.variables)
        os.chdir(program.cwd)
        tempfile.tempdir = None  # of the server's environment, if anything has asked for it
        sys.argv = [program.module, *program.arguments]
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)  # noqa: T201 - as python does
        return 1
    except BaseException as error:  # noqa: BLE001 - the fork ends here
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End a fork as python ends, but for taking modules apart, which takes longer than a short run."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
    atexit._run_exitfuncs()  # noqa: SLF001 - likewise
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _import(names: Iterable[str]) -> None:
    """Import modules; a fork that needs one which fails will raise the error again."""
    for name in names:
        with suppress(Exception):
            import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to every object, and so copy all of the memory


def _take_streams(numbers: list[int]) -> None:
    """Make these file descriptors the standard streams, as an interpreter does when it starts."""
    for standard, (number, name) in enumerate(zip(numbers, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(number, standard, inheritable=True)
        os.close(number)
        before = getattr(sys, name)
        opened = open(  # noqa: SIM115 - for as long as the process lives
            standard,
            "r" if name == "stdin" else "w",
            buffering=1 if name == "stderr" else -1,
            encoding=before.encoding,
            errors=before.errors,
            closefd=False,
        )
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
