"""The launcher's side of one host: the program that reaches it, and what it says."""

import json
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import NoneType
from typing import Annotated, Any, NamedTuple, Never, final, get_type_hints

from lanewise.errors import LaunchError
from lanewise.launch.hello import Hello
from lanewise.launch.host import COMMANDS, MARK, SECONDS_BETWEEN_BEATS
from lanewise.processes.watch.failure import Failure
from lanewise.processes.watch.typed_json import as_type, read_typed

_SECONDS_TO_CONNECT = 60.0
_SECONDS_TO_ANSWER = 30.0
_SECONDS_TO_END = 3.0
_LINES_OF_STDERR = 20
_SECONDS_TO_SAY_SO = 1.0
_SHOWN_BYTES = 80
_CHUNK_BYTES = 2**20
_BEAT = b'["beat"]\n'
_END = b'["end"]\n'


STDOUT, STDERR = 1, 2
"""The file descriptors of this process to which workers on hosts write."""


class HostError(LaunchError):
    """A host cannot do what it should.

    Args:
        host: which one.
        why: what is wrong.
    """

    def __init__(self, host: "RemoteHost", why: str) -> None:
        super().__init__(f"host {host.name}: {why}")
        self.host = host
        self.why = why


class Wire(ABC):
    """Leads to the standard input and output of a process `lanewise.launch.host`."""

    remedy: str
    """What must be so that the process starts, as a sentence."""

    @abstractmethod
    def send(self, line: bytes) -> None:
        """Send a line. Raises OSError where nobody receives it."""

    @abstractmethod
    def read(self) -> bytes:
        """Wait for something that comes, and return it; nothing when the other end has gone."""

    @abstractmethod
    def read_error(self) -> bytes:
        """Do what `read` does with what the host, or what reaches it, writes to its standard error."""

    @abstractmethod
    def close(self) -> None:
        """Close it, so that the host's process ends; and wait a moment for that."""

    @abstractmethod
    def why_ended(self) -> str:
        """Say how what reaches the host ended; empty where that says nothing."""


def host_program(python: str) -> tuple[str, ...]:
    """Return the command that starts the process on a host."""
    # -P: what lies in the user's folder must not take the place of a module.
    return (python, "-P", "-m", "lanewise.launch.host")


PYTHON_HERE = host_program(sys.executable)


@final
class CommandWire(Wire):
    """A wire through a command such as ssh or srun, which starts the process and carries its streams.

    Args:
        remedy: what must be so that it reaches the host.
        command: program and arguments; by default it is the process itself that is started, on this machine.
    """

    def __init__(self, remedy: str, command: Sequence[str] = PYTHON_HERE) -> None:
        self.remedy = remedy
        self._program = command[0]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal is for the launcher
            )
        except FileNotFoundError:
            raise LaunchError(f"{self._program} is not installed on this machine.") from None
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout
        self._stderr: Any = self._process.stderr

    def send(self, line: bytes) -> None:
        try:
            self._stdin.write(line)
            self._stdin.flush()
        except ValueError:  # it was closed meanwhile
            raise BrokenPipeError from None

    def read(self) -> bytes:
        return self._stdout.read1(_CHUNK_BYTES)  # type: ignore[no-any-return]

    def read_error(self) -> bytes:
        return self._stderr.read1(_CHUNK_BYTES)  # type: ignore[no-any-return]

    def close(self) -> None:
        with suppress(OSError, ValueError):  # the reader may close it at the same time
            self._stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # the way to the host is cut
            self._process.kill()
            self._process.wait()

    def why_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            return f"{self._program} ended with exit code {self._process.wait(_SECONDS_TO_END)}"
        return ""


class Event(NamedTuple):
    """Something that a host said by itself."""

    host: "RemoteHost"
    kind: str
    """`out`, `begun`, `leaves`, `ended`, as in `lanewise.launch.host`; or `lost`, where it is silent."""
    values: Sequence[Any]


@final
class RemoteHost:
    """A host, with the process there that runs its workers.

    Args:
        name: as the user calls it.
        num_processes: how many workers it has.
        first_rank: the rank of the first of them.
        wire: leads to it.
        events: takes what it says by itself.
    """

    def __init__(
        self, name: str, num_processes: int, first_rank: int, wire: Wire, events: "SimpleQueue[Event]"
    ) -> None:
        self.name = name
        self.num_processes = num_processes
        self.first_rank = first_rank
        self._wire = wire
        self._events = events
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self._replies: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._errors: deque[str] = deque(maxlen=_LINES_OF_STDERR)
        self._hello: Hello | None = None
        self._answer: Any = Never
        """The type of the answer that it owes."""
        self.interfaces: Sequence[str] = ("", "")
        """The values of `INTERFACE_VARIABLES` there."""
        self.is_lost = False
        """Whether it has ended, or did not answer: what it says after that is no answer any more."""
        self.num_heard = 0
        """How often it said something: where that stands still, it or the way to it is lost."""
        self._reading_errors = self._start(self._read_errors)
        self._writing = self._start(self._write)
        self._start(self._read)

    @property
    def hello(self) -> Hello:
        """What the host said of itself."""
        assert self._hello is not None
        return self._hello

    def wait_for_hello(self) -> None:
        """Wait until the host has said who it is.

        Raises:
            HostError: it can't be reached, or lanewise can't run there.
        """
        self._reply("say who it is", _SECONDS_TO_CONNECT)

    def call(self, name: str, *, within: float | None = None, **arguments: Any) -> Any:
        """Let the host do something, for so many seconds at most, and return what came of it.

        Raises:
            HostError: it could not do it, or does not answer.
        """
        assert not self.is_lost
        self._answer = get_type_hints(COMMANDS[name], include_extras=True)["return"]
        self.send("call", name, arguments)
        return self._reply("answer", within or _SECONDS_TO_ANSWER)

    def send(self, *message: object) -> None:
        """Send a message, without waiting for it to go."""
        self._outbox.put(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Let the process there end, with its workers."""
        self._outbox.put(_END)
        self._writing.join(_SECONDS_TO_SAY_SO)
        self._wire.close()

    def _reply(self, what: str, seconds: float) -> Any:
        try:
            kind, value = self._replies.get(timeout=seconds)
        except Empty:
            kind, value = "lost", f"it did not {what} within {seconds:g} s: it is very busy or stopped"
        self.is_lost = kind == "lost"
        if kind != "reply":
            raise HostError(self, value)
        return value

    def _read(self) -> None:
        """Take what the host says, until it has gone, or says what is no message."""
        lines = _lines(self._wire.read)
        line = b""
        try:
            for line in lines:  # what a login shell prints may come first
                if line.startswith(MARK.encode()):
                    self._hello = read_typed(line[len(MARK) :], Hello)
                    self._replies.put(("reply", None))
                    break
            for line in lines:
                self._take(line)
            why = self._why_lost()
        except ValueError:
            why = (
                f"it sent {line[:_SHOWN_BYTES]!r}, which is no message of this machine's lanewise. Install "
                "the same version there, and let nothing else write into the connection"
            )
        self._replies.put(("lost", why))
        self._events.put(Event(self, "lost", [why]))
        self.close()

    def _take(self, line: bytes) -> None:
        """Check a line, and do what it asks for.

        Raises:
            ValueError: it is no message that the host may send now.
        """
        kind, *values = read_typed(line, list[Any]) or [""]
        types = self._types().get(kind if isinstance(kind, str) else "", [Never])
        values = [as_type(value, hint) for value, hint in zip(values, types, strict=True)]
        self.num_heard += 1
        if kind in ("reply", "refused"):
            self._answer = Never
            self._replies.put((kind, values[0]))
        elif kind != "beat":
            self._events.put(Event(self, kind, values))

    def _types(self) -> dict[str, list[Any]]:
        """Return the types of the values of each message that the host may send."""
        ranks = range(self.first_rank, self.first_rank + self.num_processes)
        return {
            "reply": [self._answer],
            "refused": [Never if self._answer is Never else str],
            "out": [Annotated[int, ranks], Annotated[int, (STDOUT, STDERR)], str],
            "begun": [],
            "leaves": [],
            "ended": [Failure | None, bytes | None if self.first_rank == 0 else NoneType],
            "beat": [],
        }

    def _why_lost(self) -> str:
        how = self._wire.why_ended()
        self._reading_errors.join(_SECONDS_TO_END)
        said = ": ".join(filter(None, [how, "\n".join(self._errors)]))
        if self._hello is None:
            return f"{said.rstrip('.') or 'it said nothing'}. {self._wire.remedy}"
        return f"its process has ended ({said})" if said else "its process has ended"

    def _read_errors(self) -> None:
        for line in _lines(self._wire.read_error):
            self._errors.append(line.decode(errors="replace").rstrip())  # which matters if the process ends

    def _write(self) -> None:
        """Send what is to be sent, and a beat where there is nothing."""
        with suppress(OSError):  # the host has gone, which `_read` tells, or the wire is closed
            line = b""
            while line != _END:
                try:
                    line = self._outbox.get(timeout=SECONDS_BETWEEN_BEATS)
                except Empty:
                    line = _BEAT
                self._wire.send(line)

    def _start(self, target: Any) -> threading.Thread:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        return thread


def _lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yield lines, each as soon as it is there, until nothing comes or nothing can be read."""
    begun: list[bytes] = []
    with suppress(OSError):
        while chunk := read():
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                yield b"".join([*begun, end])
                begun = []
            begun.append(rest)
    if any(begun):
        yield b"".join(begun)
