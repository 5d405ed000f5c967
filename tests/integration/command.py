"""Runs the command line, cold as a user would or warm in a fork, and finds what a run leaves.

Warm is what most tests need: `lanewise` and `train` fork a process that has everything imported and nothing
computed, and its workers are forks as well. `run` and `Command` start a program from nothing; that is for
tests of signals, of how processes end, of other programs, and of variables that an interpreter reads when it
starts.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from lanewise.launch import fork_server
from lanewise.launch.fork_server import READ_AT_START

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
MNIST = ROOT / "examples" / "mnist" / "mnist.yaml"
BIN = Path(sys.executable).parent
LANEWISE = (str(BIN / "lanewise"),)
TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node")

PATIENCE_SECONDS = 120.0
"""For what takes a second on an idle machine."""
GRACE_SECONDS = 2.0
"""After this nothing of a run that ended may be left."""

_MARKER = "LANEWISE_TEST_RUN"
_PINS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    leftover: list[str]
    """Command lines of the processes that were left after a grace period."""

    @property
    def errors(self) -> list[str]:
        """The lines that start with `error:`."""
        return [line for line in self.stderr.splitlines() if line.startswith("error:")]

    def require_success(self) -> "Done":
        """Fail the test, with what the command said, unless it succeeded."""
        assert self.code == 0, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        assert self.leftover == []
        return self


class Command:
    """A running command, in a session of its own.

    Args:
        arguments: program and arguments.
        variables: added to the environment; None removes a variable.
        cwd: the working directory.
        patience_seconds: how long `finish` waits for its end.
        options: further arguments of `subprocess.Popen`.
    """

    def __init__(
        self,
        *arguments: object,
        variables: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        **options: Any,
    ) -> None:
        self._patience_seconds = patience_seconds
        self._id = uuid.uuid4().hex
        # The tests' own process is pinned; what the command pins by itself is what counts here.
        environment = {name: value for name, value in os.environ.items() if name not in _PINS}
        given = {**environment, _MARKER: self._id, **(variables or {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        self.process = subprocess.Popen(
            list(map(str, arguments)),
            env={name: value for name, value in given.items() if value is not None},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **streams,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def pids(self) -> dict[int, str]:
        """Find all processes of this run, workers of workers included; zombies don't count."""
        marker = f"{_MARKER}={self._id}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if marker in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # it ended meanwhile, or is another user's
        return found

    def worker(self, rank: int) -> int:
        """Return the process id of a rank."""

        def find() -> int | None:
            for pid in self.pids():
                with suppress(OSError):
                    name, _, fields = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    is_torchruns = (
                        f"RANK={rank}".encode() in variables and int(fields.split()[1]) == self.process.pid
                    )
                    if is_torchruns or name == f"lanewise-{rank}":
                        return pid
            return None

        return wait_for(find)

    def server(self) -> int:
        """Return the process id of what the ranks are forked from."""

        def find() -> int | None:
            for pid, command_line in self.pids().items():
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.process.pid and "-m lanewise.launch " in command_line:
                    return pid
            return None

        return wait_for(find)

    def interrupt(self) -> None:
        """Do what Ctrl-C does: the signal goes to every process in the terminal's foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self) -> Done:
        """Wait until the command ends, and then for what it leaves behind."""
        stdout, stderr = self.process.communicate(timeout=self._patience_seconds)
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return Done(self.process.returncode, stdout or "", stderr or "", list(left.values()))


def run(*arguments: object, **options: Any) -> Done:
    """Run a command to its end."""
    with Command(*arguments, **options) as command:
        return command.finish()


def lanewise(
    *arguments: object, variables: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> Done:
    """Run `lanewise ARGUMENTS` to its end in a fork of the tests' server.

    Variables that an interpreter reads when it starts make it a cold start.

    Args:
        arguments: those of the command line.
        variables: added to the environment; None removes a variable.
        cwd: the working directory.
    """
    if any(name.startswith(READ_AT_START) for name in variables or {}):
        return run(*LANEWISE, *arguments, variables=variables, cwd=cwd)
    environment = {name: value for name, value in os.environ.items() if name not in _PINS}
    given = {**environment, **(variables or {})}
    pipes = [os.pipe(), os.pipe()]
    with Path(os.devnull).open() as nothing:
        fork = fork_server({}).run(
            "lanewise",
            [str(argument) for argument in arguments],
            environment={name: value for name, value in given.items() if value is not None},
            cwd=None if cwd is None else str(cwd),
            streams=(nothing.fileno(), pipes[0][1], pipes[1][1]),
        )
    for _, write in pipes:
        os.close(write)
    try:
        texts, still_open = _read([read for read, _ in pipes], fork)
        code = fork.poll()
        assert code is not None, f"it did not end in time\n{texts[0]}\n{texts[1]}"
        return Done(code, texts[0], texts[1], _holders(still_open))
    finally:
        fork.send_signal(signal.SIGKILL)
        for read, _ in pipes:
            os.close(read)


def _read(pipes: list[int], fork: Any) -> tuple[list[str], list[int]]:
    """Read what a fork and its workers write; return it, and the pipes that somebody holds after its end."""
    texts = dict.fromkeys(pipes, b"")
    deadline = time.monotonic() + PATIENCE_SECONDS
    with selectors.DefaultSelector() as selector:
        for readable in (*pipes, fork.connection):
            selector.register(readable, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is fork.connection:
                    selector.unregister(fork.connection)
                    deadline = time.monotonic() + GRACE_SECONDS
                elif chunk := os.read(key.fd, 65536):
                    texts[key.fd] += chunk
                else:
                    selector.unregister(key.fd)
        still_open = [key.fd for key in selector.get_map().values() if key.fileobj is not fork.connection]
    return [texts[pipe].decode() for pipe in pipes], still_open


def _holders(pipes: list[int]) -> list[str]:
    """Return the command lines of the processes that hold the other end of a pipe."""
    found = {}
    names = {Path(f"/proc/self/fd/{pipe}").readlink() for pipe in pipes}
    for link in Path("/proc").glob("[0-9]*/fd/*") if pipes else ():
        pid = int(link.parts[2])
        with suppress(OSError):
            if pid != os.getpid() and link.readlink() in names:
                found[pid] = f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return list(found.values())


def train(config: Path, *overrides: object, **options: Any) -> Done:
    """Run `lanewise train CONFIG ...`, warm."""
    return lanewise("train", config, *overrides, **options)


def wait_for(find: Callable[[], T | None]) -> T:
    """Poll until something is there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := find()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return found


def write_config(folder: Path, task: str = "tasks.Line", **sections: Any) -> Path:
    """Write a configuration for one of the tasks beside this file: 4 lanes, 6 steps, the last partial.

    Args:
        folder: gets `config.yaml`; the run writes to `run` in it.
        task: the class, of a module that lies beside this file or in `search_path`.
        sections: whole sections that replace the ones here.
    """
    tree = {
        "search_path": str(Path(__file__).parent),
        "task": {"class_path": task},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "train": {"epochs": 2, "run_dir": str(folder / "run")},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        "distributed": {"equality": "exact"},
        **sections,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
