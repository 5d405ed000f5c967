"""Lets runs fail, and records what each terminal showed, how soon all was gone, and what was left."""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, final

from tests.integration.command import BIN, Cold, Command, Warm, wait_for, write_config
from tests.integration.faults import STEP_SAMPLES
from tests.integration.hosts import Host, running_hosts

STALL_SECONDS = 3.0
SECONDS_TO_END = 5.0
"""From a fault, or from the moment when it counts as a stall, all processes have so long to end."""

_EVERY_SECONDS = 0.05


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to fail, and what everybody must be told of it."""

    what: str
    """For a row of the table."""
    says: str
    """A pattern of the first error."""
    stalls: bool = False
    """Whether it shows only by the time that passes."""
    phase: str = ""
    """What the run is doing; empty: the fault comes from outside."""
    code: int = 1
    """The exit code of our launcher."""
    num_workers: int = 0
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Of `faults.Faulty`, besides the phase and the rank."""
    act: "Act | None" = None
    """The fault, where it comes from outside."""


@dataclass
class Terminal:
    """What the standard output and error of one command showed."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    """Each with the time when it was complete."""
    code: int | None = None
    """Its exit code; None: it did not end in time."""

    @property
    def text(self) -> str:
        """Everything that was shown."""
        return "\n".join(line for _, line in self.lines)

    @property
    def ours(self) -> str:
        """What was shown before torchrun's own report, and without the lines of its log."""
        before = self.text.partition("\n====")[0].splitlines()
        return "\n".join(line for line in before if "torch/distributed/" not in line)


@dataclass(frozen=True)
class Ended:
    """How a run failed."""

    terminals: Sequence[Terminal]
    """One for each node."""
    fault: float
    """When the fault happened, by the clock of the terminals."""
    seconds: float | None
    """From the fault until none of its processes was left; None: some were left for too long."""
    left: Sequence[str]
    """What was left of it: processes, listening addresses, shared memory, temporary files."""


def write_faulty(folder: Path, num_workers: int = 0, train: Any = (), **init_args: Any) -> Path:
    """Write the configuration of a run that fails; `init_args` are those of `faults.Faulty`.

    It has 4 lanes, and saves and evaluates every 4 steps. The fault leaves its mark in the folder.
    """
    return write_config(
        folder,
        "faults.Faulty",
        {"mark": str(folder / "mark"), **init_args},
        batch={"global_batch_size": STEP_SAMPLES, "micro_batch_size": STEP_SAMPLES // 4},
        train={"max_steps": 20, "run_dir": str(folder / "run"), **dict(train)},
        data={"order": "sequential", "num_workers": num_workers},
        evaluate={"every_steps": 4},
        checkpoint={"every": {"steps": 4}},
    )


@final
class Observed:
    """Reads what the commands of a run show, until it has failed and all of it is gone.

    Args:
        folder: where the run leaves its mark.
    """

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "mark"
        self._running = ExitStack()
        self._commands: list[Command] = []
        self._terminals: list[Terminal] = []
        self._folders = ExitStack()
        self._emptied: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
        self._folders.close()

    def folder(self) -> Path:
        """Make an empty folder, with a short path; what is in it in the end was left by the run."""
        made = self._folders.enter_context(tempfile.TemporaryDirectory(prefix="f-", dir="/tmp"))
        self._emptied.append(Path(made))
        return self._emptied[-1]

    def start(self, command: Callable[[int], Command]) -> None:
        """Start a command, which is given the file descriptor that is its standard output and error."""
        read, write = os.pipe()
        terminal = Terminal()
        thread = threading.Thread(target=_read, args=(read, terminal))
        thread.start()
        self._running.callback(thread.join)
        try:
            self._commands.append(self._running.enter_context(command(write)))
        finally:
            os.close(write)
        self._terminals.append(terminal)

    def mark(self) -> None:
        """Note that this moment is that of the fault, which comes from outside."""
        self._mark.write_text(json.dumps({"seconds": time.monotonic()}))

    def finish(self, patience_seconds: float, listening: Callable[[], list[str]] = list) -> Ended:
        """Wait until nothing of the run is left, but not for longer after the fault.

        Args:
            patience_seconds: how long.
            listening: returns the addresses where somebody listens.
        """
        wait_for(lambda: self._mark.exists() or all(command.poll() is not None for command in self._commands))
        assert self._mark.exists(), "\n".join(["there was no fault", *(one.text for one in self._terminals)])
        fault = json.loads(self._mark.read_bytes())["seconds"]
        while (pids := self._pids()) and time.monotonic() < fault + patience_seconds:
            time.sleep(_EVERY_SECONDS)
        seconds = None if pids else time.monotonic() - fault
        left = [*pids.values(), *listening()]
        for command, terminal in zip(self._commands, self._terminals, strict=True):
            terminal.code = command.poll() if pids else wait_for(partial(_code, command))[0]
        self._running.close()
        left += [str(path.relative_to(folder)) for folder in self._emptied for path in folder.iterdir()]
        return Ended(self._terminals, fault, seconds, left)

    def _pids(self) -> dict[int, str]:
        return {pid: line for command in self._commands for pid, line in command.pids().items()}


def _code(command: Command) -> tuple[int] | None:
    code = command.poll()
    return None if code is None else (code,)


def _read(number: int, terminal: Terminal) -> None:
    with open(number, errors="replace") as shown:
        for line in shown:
            terminal.lines.append((time.monotonic(), line.rstrip()))


def on_one_machine(config: Path, *overrides: object, patience_seconds: float = 20) -> Ended:
    """Let a run of two processes fail, which our launcher starts, warm."""
    with Observed(config.parent) as run:
        variables = {"TMPDIR": str(run.folder())}
        arguments = ("train", config, "--distributed.devices", 2, *overrides)
        run.start(lambda output: Warm(*arguments, variables=variables, output=output))
        return run.finish(patience_seconds)


Act = Callable[[Sequence[Host], Sequence[Command]], object]


def on_hosts(
    config: Path, launcher: str, *overrides: object, act: Act | None = None, patience_seconds: float = 20
) -> Ended:
    """Let a run fail on hosts of its own, each with two processes.

    Args:
        config: what `write_faulty` wrote.
        launcher: a name in `LAUNCHERS`.
        overrides: of the configuration.
        act: makes it fail from outside, after some steps.
        patience_seconds: how long it may take to end.
    """
    command_lines = LAUNCHERS[launcher]
    with running_hosts(len(command_lines)) as hosts, Observed(config.parent) as run:
        names = config.parent / "hosts"
        names.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{host.address} node{number}\n" for number, host in enumerate(hosts))
        )
        commands = []
        for number, (host, command_line) in enumerate(zip(hosts, command_lines, strict=True)):
            line = [*command_line, "train", config, *overrides]
            entered = host.enter_as(f"node{number}", names, run.folder(), *line)
            variables = {"TMPDIR": str(run.folder())}
            if len(hosts) > 1:
                variables["GLOO_SOCKET_IFNAME"] = host.interface
            run.start(partial(_start, commands, entered, variables))
        if act is not None:
            metrics = config.parent / "run" / "metrics.jsonl"
            wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 3)
            run.mark()
            act(hosts, commands)
        return run.finish(patience_seconds, lambda: [address for host in hosts for address in host.listening()])


def _start(commands: list[Command], line: Sequence[object], variables: Mapping[str, str], output: int) -> Command:
    commands.append(Cold(*line, variables=variables, stdout=output, stderr=output))
    return commands[-1]


def _torchrun(*options: str) -> list[str]:
    return [str(BIN / "torchrun"), "--nnodes=2", "--nproc-per-node=2", *options, "-m", "lanewise"]


_STATIC = ("--master-addr=10.77.0.1", "--master-port=29400")
_C10D = ("--rdzv-backend=c10d", "--rdzv-id=fails", "--rdzv-endpoint=10.77.0.1:29400")
LAUNCHERS: Mapping[str, Sequence[Sequence[str]]] = {
    "lanewise": [[str(BIN / "lanewise")]],
    "static": [_torchrun(*_STATIC, f"--node-rank={number}") for number in range(2)],
    "c10d": [_torchrun(*_C10D, f"--rdzv-conf=is_host={1 - number}", f"--local-addr=10.77.0.{number + 1}") for number in range(2)],
}
"""The command line for each host."""
