"""`python -m lanewise.launch.host`: runs the workers of one host for a launcher on another.

A launcher starts it by ssh, srun or a Ray actor, and talks with it through its standard input and output: a
line of JSON for each message. No file of the launcher's machine is needed here.

    launcher                                 host
    --------                                 ----
                                        <-   MARK and who it is (`Hello`); what came before is not of ours
    ["call", name, arguments]           ->   does what the method of `HostProcess` with that name does
                                        <-   ["reply", what it returned] or ["refused", why]
    ["stop"]                            ->   lets the workers save and stop
    ["end"]                             ->   ends with all workers
                                        <-   ["out", rank, 1 or 2, a line that a worker wrote there]
                                        <-   ["begun"]  they train
                                        <-   ["leaves"]  a signal told this host to let them save and stop
                                        <-   ["ended", the first failure or null, the result or null]
    ["beat"] twice a second             <->  ["beat"] twice a second

It also ends with all workers when its standard input ends, or when nothing came for as long as the run may
make no progress: then the launcher, its machine or the way to it is gone. Only where a signal ended it the
workers save first: that of Slurm ends srun, too, and a shutdown ends sshd first.
"""

import base64
import hashlib
import json
import os
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, final

from lanewise.errors import LanewiseError, LaunchError, text_of
from lanewise.launch.agent import JobFiles, Place, Streams, Workers, join_store, open_store, run_workers
from lanewise.launch.fork_client import end_servers, fork_client
from lanewise.launch.hello import Port, call, say_hello
from lanewise.launch.launcher import count_processes
from lanewise.launch.membership import Sight
from lanewise.launch.scratch import folder_until_exit, remove_all
from lanewise.processes.die_with_parent import name_process
from lanewise.processes.watch.failure import Failure

MARK = "lanewise host: "
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables in which a user names the interface that leads to the other hosts."""
SECONDS_BETWEEN_BEATS = 0.5
_CHECKS_PER_BEAT = 5
"""How often it looks whether the workers train: from then on a signal lets them save."""
_SECONDS_FOR_THE_FIRST_WORD = 60.0
_SECONDS_TO_SEE = 100.0
_SECONDS_FOR_SLURMS_SIGNAL = 2.0
"""How much later than to srun it may come to this process."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_BUFFER_BYTES = 65536


def main() -> NoReturn:
    """Serve one launcher, until it has gone."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed here must not get between the messages
    HostProcess(replies).serve()


@final
class HostProcess:
    """Does what the launcher asks for: the methods in `COMMANDS`, which return values of JSON.

    What arrives of these at the launcher must have the type of the method's annotation.

    Args:
        replies: where its messages go.
    """

    def __init__(self, replies: Any) -> None:
        self._replies = replies
        self._writing = threading.Lock()
        self._listener = socket.create_server(("", 0))  # by which the others find out whether they reach it
        self._files: JobFiles | None = None
        self._limit_seconds: float | None = _SECONDS_FOR_THE_FIRST_WORD
        self._is_told_to_stop = self._is_drained = False
        self._has_workers = False
        self._has_begun = False
        self._store: Any = None

    def serve(self) -> NoReturn:
        """Say who this is, and do what is asked for until the launcher has gone."""
        for sign in _STOP_SIGNALS:
            signal.signal(sign, lambda *_: self._drain())  # Slurm may send one twice
        for sign in (signal.SIGINT, signal.SIGHUP):
            signal.signal(sign, signal.SIG_IGN)  # it is the launcher that says what they mean
        self._write(MARK.encode() + json.dumps(asdict(say_hello(self._listener))).encode())
        threading.Thread(target=self._beat, daemon=True).start()
        for kind, *rest in self._messages():
            if kind == "call":
                name, arguments = rest
                try:
                    self._send("reply", COMMANDS[name](self, **arguments))
                except OSError as error:
                    what = f"{error.filename}: {error.strerror}" if error.filename else text_of(error)
                    self._send("refused", what)
                except LanewiseError as error:
                    self._send("refused", text_of(error))
            elif kind == "stop":
                self._stop_workers()
            elif kind == "end":
                self._end()
        if self._is_drained or "SLURM_STEP_ID" in os.environ:
            self._let_workers_stop()
        self._end()

    def enter(
        self, folder: str, variables: Mapping[str, str], limit_seconds: float | None
    ) -> tuple[str, str]:
        """Take the working directory and the environment; return the interfaces that are set there.

        Torch begins to be imported: here for the store, and in the process that workers are forked from.
        """
        os.chdir(folder)
        os.environ.update(variables)
        self._limit_seconds = limit_seconds
        tempfile.tempdir = None  # of the environment before
        self._files = JobFiles(folder_until_exit() / "job")
        if self._is_told_to_stop:
            self._stop_workers()
        fork_client({})
        threading.Thread(target=import_module, args=("torch.distributed",), daemon=True).start()
        gloo, nccl = INTERFACE_VARIABLES
        return os.environ.get(gloo, ""), os.environ.get(nccl, "")

    def compare(self, search_path: str, sources: Mapping[str, str]) -> list[str]:
        """Return which files differ from those of the launcher: relative paths and what is wrong."""
        wrong = []
        for name, digest in sources.items():
            file = Path(search_path, name)
            if not file.is_file():
                wrong.append(f"{name} is missing")
            elif hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                wrong.append(f"{name} differs")
        return wrong

    def reach(self, peers: Sequence[tuple[str, Sequence[str], int]]) -> list[list[str]]:
        """Call hosts, given as token, addresses and port; return for each address why it can't be reached."""
        calls = [(token, address, port) for token, addresses, port in peers for address in addresses]
        with ThreadPoolExecutor(max(1, len(calls))) as pool:
            whys = iter(list(pool.map(lambda target: call(*target), calls)))
        return [[next(whys) for _ in addresses] for _, addresses, _ in peers]

    def leave(self, path: str) -> list[str]:
        """Leave a file for the other hosts to find; return the folders that were made for it."""
        made = [str(folder) for folder in Path(path).parents if not folder.exists()]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
        return made

    def find(self, path: str) -> bool:
        """Tell whether such a file is there."""
        return Path(path).exists()

    def remove(self, path: str, folders: Sequence[str]) -> None:
        """Remove such a file, and the folders that were made for it."""
        Path(path).unlink(missing_ok=True)
        for folder in folders:
            with suppress(OSError):  # something else is in it by now
                Path(folder).rmdir()

    def see(self, program: Sequence[str]) -> Sight:
        """Return what a short process says of the run; it imports what this one does not."""
        module, *arguments = program
        with tempfile.TemporaryFile() as said, Path(os.devnull).open("rb") as nothing:
            streams = nothing.fileno(), said.fileno(), 2
            fork = fork_client({}).run(module, arguments, environment=os.environ, streams=streams)
            if (code := fork.wait(_SECONDS_TO_SEE)) != 0:  # None where its file system does not answer
                raise LaunchError(f"no process could look at the run there: its exit code is {code}.")
            said.seek(0)
            return json.load(said)  # type: ignore[no-any-return]

    def open_store(self, address: str) -> Port:
        """Open the store of the world; return its port."""
        self._store, port = open_store(address)
        return port

    def run(self, workers: Mapping[str, Any], place: Mapping[str, Any], job: str, port: int) -> None:
        """Start the workers; the rest is told later."""
        assert self._files is not None
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._files.job.write_bytes(base64.b64decode(job))
        self._has_workers = True
        given = Workers(**workers), Place(**place), self._files, port
        threading.Thread(target=self._run, args=given, daemon=True).start()

    def _run(self, workers: Workers, place: Place, files: JobFiles, port: int) -> None:
        """Run the workers, and tell how they ended."""
        name_process(f"lanewise: host {place.node}, {count_processes(place.num_processes)}")
        try:
            store = self._store or join_store(place.address, port)
            with _Outputs(self._send, place.first_rank) as outputs:
                failure = run_workers(workers, place, files, store, port, outputs.open)
        except Exception as error:  # noqa: BLE001 - it is the launcher that raises it
            failure = Failure.of(error, place.first_rank)
        self._tell_begun()
        result = base64.b64encode(files.result.read_bytes()).decode() if files.result.exists() else None
        self._send("ended", None if failure is None else asdict(failure), result)
        self._has_workers = False

    def _stop_workers(self) -> None:
        """Let the workers save and stop, as soon as they are there."""
        self._is_told_to_stop = True
        if self._files is not None:
            self._files.stop.touch()

    def _drain(self) -> None:
        """Let the workers save and stop, and tell the launcher that this host wants it."""
        self._is_drained = True
        self._stop_workers()  # and by another thread, as the signal may have come while this one sends:
        threading.Thread(target=self._send, args=("leaves",), daemon=True).start()

    def _let_workers_stop(self) -> None:
        """Wait for the workers, if they were told to stop or are told so within a moment."""
        deadline = time.monotonic() + _SECONDS_FOR_SLURMS_SIGNAL
        while self._has_workers and (self._is_told_to_stop or time.monotonic() < deadline):
            time.sleep(0.05)

    def _messages(self) -> Iterator[list[Any]]:
        """Yield what the launcher says, until it has gone."""
        rest = b""
        last = time.monotonic()
        while True:
            ready, _, _ = select.select([0], [], [], SECONDS_BETWEEN_BEATS)
            if ready:
                received = os.read(0, _BUFFER_BYTES)
                if not received:
                    return
                *lines, rest = (rest + received).split(b"\n")
                last = time.monotonic()
                yield from map(json.loads, filter(None, lines))
            elif self._limit_seconds is not None and time.monotonic() - last > self._limit_seconds:
                return

    def _beat(self) -> None:
        while True:
            self._send("beat")
            for _ in range(_CHECKS_PER_BEAT):
                time.sleep(SECONDS_BETWEEN_BEATS / _CHECKS_PER_BEAT)
                self._tell_begun()

    def _tell_begun(self) -> None:
        if not self._has_begun and self._files is not None and self._files.begun.exists():
            self._has_begun = True
            self._send("begun")

    def _send(self, *message: object) -> None:
        self._write(json.dumps(message).encode())

    def _write(self, line: bytes) -> None:
        with self._writing:
            try:
                self._replies.write(line + b"\n")
                self._replies.flush()
            except OSError:
                if not self._is_drained:  # else sshd ends before the workers have saved
                    self._end()

    def _end(self) -> NoReturn:
        """End this process, with the workers."""
        end_servers()
        remove_all()
        os._exit(0)


COMMANDS: Mapping[str, Callable[..., Any]] = {
    "enter": HostProcess.enter,
    "compare": HostProcess.compare,
    "reach": HostProcess.reach,
    "leave": HostProcess.leave,
    "find": HostProcess.find,
    "remove": HostProcess.remove,
    "see": HostProcess.see,
    "open_store": HostProcess.open_store,
    "run": HostProcess.run,
}
"""What a launcher may ask a host to do, by name."""


@final
class _Outputs:
    """Sends what workers write, line by line.

    Args:
        send: sends a message.
        first_rank: the rank of the first worker here.
    """

    def __init__(self, send: Callable[..., None], first_rank: int) -> None:
        self._send = send
        self._first_rank = first_rank
        self._threads: list[threading.Thread] = []
        self._ends: list[int] = []

    def __enter__(self) -> "_Outputs":
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            os.close(end)
        for thread in self._threads:
            thread.join(SECONDS_BETWEEN_BEATS)  # something that a worker started may keep them open

    def open(self, local_rank: int) -> Streams:
        """Return the standard streams for a worker."""
        rank = self._first_rank + local_rank
        streams = [os.open(os.devnull, os.O_RDONLY)]
        for number in (1, 2):
            read, write = os.pipe()
            streams.append(write)
            thread = threading.Thread(target=self._forward, args=(rank, number, read), daemon=True)
            thread.start()
            self._threads.append(thread)
        self._ends += streams
        return streams[0], streams[1], streams[2]

    def _forward(self, rank: int, number: int, read: int) -> None:
        with os.fdopen(read, "rb") as lines:
            while line := lines.readline(_BUFFER_BYTES):
                text = line.decode(errors="replace").rstrip("\r\n")
                self._send("out", rank, number, text.rpartition("\r")[2])  # what a terminal would show


if __name__ == "__main__":
    main()
