"""Runs the command line, cold as a user would or warm in a fork, and finds what a run leaves.

Warm is what most tests need: `lanewise`, `train` and `Warm` fork a process that has everything imported and
nothing computed, and its workers are forks as well. `run` and `Cold` start a program from nothing; that is
for other programs, for variables that an interpreter reads when it starts, and for what becomes of the
server from which workers are forked.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from lanewise.launch import fork_client
from lanewise.launch.fork_client import READ_AT_START
from tests.patience import patient

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
MNIST = ROOT / "examples" / "mnist" / "mnist.yaml"
BIN = Path(sys.executable).parent
LANEWISE = (str(BIN / "lanewise"),)
TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node")

PATIENCE_SECONDS = patient(120.0)
"""For what takes a second on an idle machine."""
GRACE_SECONDS = patient(30.0)
"""After this nothing of a run that ended may be left, however slow the machine is."""

MARKER = "LANEWISE_TEST_RUN"
"""The variable by which the processes of a program are found."""
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


class Command(ABC):
    """A running command, in a session of its own; the end of the `with` block kills what is left of it."""

    patience_seconds = PATIENCE_SECONDS
    """How long `finish` waits for its end."""
    pid: int
    """Of the process that the command line became: of the launcher, where there are several processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._close()

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the process runs."""

    @abstractmethod
    def _finish(self) -> tuple[str, str]:
        """Wait for the end, and return what was written to the standard output and error."""

    @abstractmethod
    def _is_ours(self, folder: Path) -> bool:
        """Tell by its folder in /proc whether a process belongs to this run."""

    @abstractmethod
    def _close(self) -> None:
        """Close what reads from the command, which has ended."""

    def pids(self) -> dict[int, str]:
        """Find all processes of this run, workers of workers included; zombies don't count."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile, or is another user's
                if self._is_ours(folder):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    def worker(self, rank: int) -> int:
        """Return the process id of a rank."""

        def find() -> int | None:
            for pid in self.pids():
                with suppress(OSError):
                    title = Path(f"/proc/{pid}/cmdline").read_text()
                    if title.startswith(f"lanewise: rank {rank} of "):
                        return pid
            return None

        return wait_for(find)

    def interrupt(self) -> None:
        """Do what Ctrl-C does: the signal goes to every process in the terminal's foreground."""
        os.killpg(self.pid, signal.SIGINT)

    def finish(self) -> Done:
        """Wait until the command ends, and then for what it leaves behind."""
        stdout, stderr = self._finish()
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        code = self.poll()
        assert code is not None, f"it did not end in time\n{stdout}\n{stderr}"
        return Done(code, stdout, stderr, list(left.values()))


class Cold(Command):
    """A program that starts from nothing.

    Args:
        arguments: program and arguments.
        variables: added to the environment; None removes a variable.
        cwd: the working directory.
        options: further arguments of `subprocess.Popen`.
    """

    def __init__(
        self,
        *arguments: object,
        variables: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> None:
        marker = uuid.uuid4().hex
        self._marker = f"{MARKER}={marker}".encode()
        self._process = subprocess.Popen(
            list(map(str, arguments)),
            env=_environment({MARKER: marker, **(variables or {})}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        self.pid = self._process.pid

    def server(self) -> int:
        """Return the process id of what the ranks are forked from."""

        def find() -> int | None:
            for pid, command_line in self.pids().items():
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.pid and "-m lanewise.launch " in command_line:
                    return pid
            return None

        return wait_for(find)

    def poll(self) -> int | None:
        """See `Command`."""
        return self._process.poll()

    def _finish(self) -> tuple[str, str]:
        stdout, stderr = self._process.communicate(timeout=self.patience_seconds)
        return stdout or "", stderr or ""

    def _is_ours(self, folder: Path) -> bool:
        return self._marker in (folder / "environ").read_bytes().split(b"\0")

    def _close(self) -> None:
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


class Warm(Command):
    """`lanewise ARGUMENTS` in a fork of the tests' server, which has everything imported.

    Args:
        arguments: those of the command line.
        variables: added to the environment; None removes a variable.
        cwd: the working directory.
        output: the standard output and error, such as a terminal; None: `finish` returns what they got.
    """

    def __init__(
        self,
        *arguments: object,
        variables: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        output: int | None = None,
    ) -> None:
        read_at_start = [name for name in variables or {} if name.startswith(READ_AT_START)]
        assert not read_at_start, f"a fork has read {read_at_start} already"
        streams = stdin, stdout, stderr = [os.pipe() for _ in range(3)]
        # An empty input of its own, which every process of the run holds as long as it lives.
        os.close(stdin[1])
        self._stdin = Path(f"/proc/self/fd/{stdin[0]}").readlink()
        self._fork = fork_client({}).run(
            "lanewise",
            [str(argument) for argument in arguments],
            environment=_environment(variables or {}),
            cwd=None if cwd is None else str(cwd),
            streams=(stdin[0], output or stdout[1], output or stderr[1]),
        )
        for number in (stdin[0], stdout[1], stderr[1]):
            os.close(number)
        self._outputs = [read for read, _ in streams[1:]]
        self.pid = self._fork.pid

    def poll(self) -> int | None:
        """See `Command`."""
        return self._fork.poll()

    def _finish(self) -> tuple[str, str]:
        texts = dict.fromkeys(self._outputs, b"")
        deadline = time.monotonic() + self.patience_seconds
        with selectors.DefaultSelector() as selector:
            for readable in self._outputs:
                selector.register(readable, selectors.EVENT_READ)
            if self.poll() is None:
                selector.register(self._fork.connection, selectors.EVENT_READ)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is self._fork.connection:
                        selector.unregister(self._fork.connection)
                        deadline = time.monotonic() + GRACE_SECONDS
                    elif chunk := os.read(key.fd, 65536):
                        texts[key.fd] += chunk
                    else:
                        selector.unregister(key.fd)
        stdout, stderr = (text.decode() for text in texts.values())
        return stdout, stderr

    def _is_ours(self, folder: Path) -> bool:
        return (folder / "fd" / "0").readlink() == self._stdin

    def _close(self) -> None:
        self._fork.wait(GRACE_SECONDS)
        for read in self._outputs:
            os.close(read)


def _environment(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Add variables to those of this process but for its pins, since what a command pins is what counts."""
    given = {**{name: value for name, value in os.environ.items() if name not in _PINS}, **variables}
    return {name: value for name, value in given.items() if value is not None}


def run(*arguments: object, **options: Any) -> Done:
    """Run a program to its end; see `Cold`."""
    with Cold(*arguments, **options) as command:
        return command.finish()


def lanewise(*arguments: object, patience_seconds: float = PATIENCE_SECONDS, **options: Any) -> Done:
    """Run `lanewise ARGUMENTS` to its end, which may take so long; see `Warm`."""
    with Warm(*arguments, **options) as command:
        command.patience_seconds = patience_seconds
        return command.finish()


def train(config: Path, *overrides: object, **options: Any) -> Done:
    """Run `lanewise train CONFIG ...`, warm."""
    return lanewise("train", config, *overrides, **options)


def wait_for(find: Callable[[], T | None], every_seconds: float = 0.01) -> T:
    """Poll until something is there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := find()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(every_seconds)
    return found


def write_config(
    folder: Path, task: str = "tasks.Line", init_args: Mapping[str, Any] | None = None, **sections: Any
) -> Path:
    """Write a configuration for one of the tasks beside this file: 4 lanes, 6 steps, the last partial.

    Args:
        folder: gets `config.yaml`; the run writes to `run` in it.
        task: the class, of a module that lies beside this file or in `search_path`.
        init_args: its arguments.
        sections: whole sections that replace the ones here; `distributed` says `exact` if nothing else.
    """
    tree = {
        "search_path": str(Path(__file__).parent),
        "task": {"class_path": task, "init_args": dict(init_args or {})},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "train": {"epochs": 2, "run_dir": str(folder / "run")},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        "log": {"every_steps": 1},
        **sections,
        "distributed": {"equality": "exact", **sections.get("distributed", {})},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
