"""Lets runs fail, and records what each terminal showed, how soon all was gone, and what was left."""

import os
import re
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
from tests.integration.slurm import Slurm
from tests.integration.ssh import Cluster
from tests.patience import SLOWNESS, patient

STALL_SECONDS = patient(3.0)
START_SECONDS = patient(6.0)
"""In runs that stall before their first step; others may need longer on a busy machine."""
SECONDS_TO_END = patient(15.0)
"""From a fault, or from the moment when it counts as a stall, all processes have so long to end: two are
usual, and the next limit is far away."""

PATIENCE_SECONDS = patient(60.0)
"""What takes longer to end does not end."""
_EVERY_SECONDS = 0.05
_ERROR = re.compile(r"error: |rank \d+ ")


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
    def first_error(self) -> str:
        """What was shown from the first error on, but for what torchrun and srun say of it."""
        before = self.text.partition("failed (exitcode: ")[0]
        lines = [line for line in before.splitlines() if not re.match("srun: |.*torch/distributed/", line)]
        start = next((number for number, line in enumerate(lines) if _ERROR.match(line)), len(lines))
        return "\n".join(lines[start:])


@dataclass(frozen=True)
class Ended:
    """How a run failed."""

    terminals: Sequence[Terminal]
    """One for each node."""
    faults: Sequence[float]
    """When each fault happened, by the clock of the terminals."""
    seconds: float | None
    """From the last fault until none of its processes was left; None: some were left for too long."""
    left: Sequence[str]
    """What was left of it: processes, listening addresses, shared memory, temporary files."""


def write_faulty(folder: Path, num_workers: int = 0, **init_args: Any) -> Path:
    """Write the configuration of a run that fails; `init_args` are those of `faults.Faulty`.

    It has 4 lanes, and evaluates and saves every 4 steps. The fault leaves its mark in the folder.
    """
    return write_config(
        folder,
        "faults.Faulty",
        {"mark": str(folder / "mark"), "slowness": SLOWNESS, **init_args},
        batch={"global_batch_size": STEP_SAMPLES, "micro_batch_size": STEP_SAMPLES // 4},
        train={"max_steps": 20, "run_dir": str(folder / "run")},
        data={"order": "sequential", "num_workers": num_workers},
        evaluate={"every_steps": 4},
        checkpoint={"every": {"steps": 4}},
        distributed={"stall_seconds": STALL_SECONDS, "start_seconds": patient(60.0)},
    )


@final
class Observed:
    """Reads what the commands of a run show, until it has failed and all of it is gone.

    Args:
        folder: where the run leaves its mark.
        elsewhere: returns the processes of the run, by number, that its commands have not started themselves.
    """

    def __init__(self, folder: Path, elsewhere: Callable[[], Mapping[int, str]] = dict) -> None:
        self._elsewhere = elsewhere
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
        self._mark.write_text(f"{time.monotonic()}\n")

    def finish(
        self, listening: Callable[[], list[str]] = list, patience_seconds: float = PATIENCE_SECONDS
    ) -> Ended:
        """Wait until nothing of the run is left, but not for too long after the fault.

        Args:
            listening: returns the addresses where somebody listens.
            patience_seconds: how long.
        """
        wait_for(lambda: self._faults() or all(command.poll() is not None for command in self._commands))
        shown = "\n".join(one.text for one in self._terminals)
        assert self._faults(), f"there was no fault\n{shown}"
        deadline = time.monotonic() + patience_seconds
        while (pids := self._pids()) and time.monotonic() < deadline:
            time.sleep(_EVERY_SECONDS)
        faults = self._faults()
        seconds = None if pids else time.monotonic() - faults[-1]
        left = [*pids.values(), *listening()]
        for command, terminal in zip(self._commands, self._terminals, strict=True):
            terminal.code = command.poll() if pids else wait_for(partial(_code, command))[0]
        self._running.close()
        left += [str(path.relative_to(folder)) for folder in self._emptied for path in folder.iterdir()]
        return Ended(self._terminals, faults, seconds, left)

    def _faults(self) -> list[float]:
        return [float(line) for line in self._mark.read_text().split()] if self._mark.exists() else []

    def _pids(self) -> dict[int, str]:
        own = {pid: line for command in self._commands for pid, line in command.pids().items()}
        return {**own, **self._elsewhere()}


def _code(command: Command) -> tuple[int] | None:
    code = command.poll()
    return None if code is None else (code,)


def _read(number: int, terminal: Terminal) -> None:
    with open(number, errors="replace") as shown:
        for line in shown:
            terminal.lines.append((time.monotonic(), line.rstrip()))


def on_one_machine(config: Path, *overrides: object, variables: Mapping[str, str] | None = None) -> Ended:
    """Let a run of two processes fail, which our launcher starts, warm."""
    with Observed(config.parent) as run:
        given = {**(variables or {}), "TMPDIR": str(run.folder())}
        arguments = ("train", config, "--distributed.devices", 2, *overrides)
        run.start(lambda output: Warm(*arguments, variables=given, output=output))
        return run.finish()


Act = Callable[[Sequence[Host], Sequence[Command]], object]


def on_hosts(
    config: Path,
    launcher: str,
    *overrides: object,
    act: Act | None = None,
    variables: Mapping[str, str] | None = None,
    max_restarts: int = 0,
) -> Ended:
    """Let a run fail on hosts of its own, each with two processes.

    Args:
        config: what `write_faulty` wrote.
        launcher: a name in `LAUNCHERS`.
        overrides: of the configuration.
        act: makes it fail from outside, after some steps.
        variables: added to the environment.
        max_restarts: how often torchrun starts the processes again.
    """
    command_lines = LAUNCHERS[launcher]
    names = config.parent / "hosts"
    with running_hosts(len(command_lines)) as hosts, Observed(config.parent) as run:
        lines = [f"{host.address} node{number}\n" for number, host in enumerate(hosts)]
        names.write_text("127.0.0.1 localhost\n" + "".join(lines))
        commands: list[Command] = []
        for number, (host, (program, *options)) in enumerate(zip(hosts, command_lines, strict=True)):
            restarts = [f"--max-restarts={max_restarts}"] if max_restarts else []
            line = [program, *restarts, *options, "train", config, *overrides]
            entered = host.boot(f"node{number}", names, run.folder(), *line)
            given = {**(variables or {}), "TMPDIR": str(run.folder())}
            if len(hosts) > 1:
                given["GLOO_SOCKET_IFNAME"] = host.interface
            run.start(partial(_start, commands, entered, given))
        if act is not None:
            wait_for_steps(config)
            run.mark()
            act(hosts, commands)
        listening = [host.listening for host in hosts]
        patience_seconds = PATIENCE_SECONDS * (1 + max_restarts)
        return run.finish(lambda: [one for listen in listening for one in listen()], patience_seconds)


def under_slurm(slurm: Slurm, config: Path) -> Ended:
    """Let a run fail on Slurm's two nodes, each with two processes; srun has the one terminal."""
    with Observed(config.parent) as run:
        line = ("srun", "--nodes=2", "--ntasks-per-node=2", "lanewise", "train", config)
        variables = {"TMPDIR": str(run.folder())}
        run.start(lambda output: slurm.start(*line, variables=variables, stdout=output, stderr=output))
        return run.finish()


def over_ssh(cluster: Cluster, config: Path, *overrides: object, act: Act | None = None) -> Ended:
    """Let a run fail that `launcher: ssh` starts on two hosts, each with two processes.

    Args:
        cluster: the hosts.
        config: what `write_faulty` wrote.
        overrides: of the configuration.
        act: see `on_hosts`.
    """
    before = cluster.listening()
    with Observed(config.parent, cluster.pids) as run:
        folder = run.folder()
        command_line = ("train", config, *OVER_SSH, "--distributed.ssh.variables.TMPDIR", folder, *overrides)
        commands: list[Command] = []

        def start(output: int) -> Command:
            commands.append(
                cluster.start(*command_line, variables={"TMPDIR": str(folder)}, stdout=output, stderr=output)
            )
            return commands[0]

        run.start(start)
        if act is not None:
            wait_for_steps(config)
            run.mark()
            act(cluster.hosts, commands)
        return run.finish(lambda: [one for one in cluster.listening() if one not in before])


def wait_for_steps(config: Path) -> None:
    """Wait until a run has taken some steps."""
    metrics = config.parent / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 3)


def _start(
    commands: list[Command], line: Sequence[object], variables: Mapping[str, str], output: int
) -> Command:
    commands.append(Cold(*line, variables=variables, stdout=output, stderr=output))
    return commands[-1]


def _torchrun(*options: str, num_nodes: int = 2) -> list[str]:
    return [
        *(str(BIN / "torchrun"), f"--nnodes={num_nodes}", "--nproc-per-node=2"),
        *(*options, "-m", "lanewise"),
    ]


OVER_SSH = ("--distributed.launcher", "ssh", "--distributed.hosts", "['node0:2', 'node1:2']")
_STATIC = ("--master-addr=10.77.0.1", "--master-port=29400")
_C10D = ("--rdzv-backend=c10d", "--rdzv-id=fails", "--rdzv-endpoint=10.77.0.1:29400")


def _c10d_of(number: int) -> tuple[str, str]:
    return f"--rdzv-conf=is_host={1 - number}", f"--local-addr=10.77.0.{number + 1}"


LAUNCHERS: Mapping[str, Sequence[Sequence[str]]] = {
    "lanewise": [[str(BIN / "lanewise")]],
    "torchrun": [_torchrun("--master-addr=127.0.0.1", "--master-port=29400", num_nodes=1)],
    "static": [_torchrun(*_STATIC, f"--node-rank={number}") for number in range(2)],
    "c10d": [_torchrun(*_C10D, *_c10d_of(number)) for number in range(2)],
}
"""The command line for each host."""
