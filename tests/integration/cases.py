"""The ways in which a run fails, each with what everybody must be told of it."""

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

from tests.integration.command import Command
from tests.integration.failing import (
    SECONDS_TO_END,
    STALL_SECONDS,
    START_SECONDS,
    Act,
    Ended,
    on_hosts,
    on_one_machine,
    over_ssh,
    write_faulty,
)
from tests.integration.faults import GROUP_VARIABLE, STEP_SAMPLES
from tests.integration.ssh import running_ssh

KILLED = 128 + signal.SIGKILL
RAISED = "ValueError: the image is upside down"
SAMPLES = r"in step 3, lane {lane}, samples \[{samples}\]"


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to fail."""

    what: str
    """For a row of the table."""
    says: tuple[str, ...] = ()
    """Patterns that the first error has; `{rank}`, `{lane}`, `{samples}` and `{host}` stand for those of the
    rank that fails."""
    phase: str = ""
    """The one in which it fails; empty: the fault comes from outside."""
    fault: str = "exception"
    """A name in `faults.FAULTS`."""
    code: int = 1
    """The exit code of our launcher."""
    num_workers: int = 0
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Of the task, besides the phase, the fault and the rank."""
    allowed_seconds: float = SECONDS_TO_END
    """From the fault until all is gone."""
    act: Act | None = None
    """What somebody does to the run, where the fault comes from outside."""
    is_of_all: bool = False
    """Whether any rank may be the one that tells it."""
    disk_mib: int = 0
    """The size of the disk where the run writes; 0: it is not full."""

    def run(self, folder: Path, launcher: str, rank: int) -> Ended:
        """Let it happen.

        Args:
            folder: an empty one.
            launcher: one of `failing.LAUNCHERS`, or `warm` or `ssh`.
            rank: the one that fails.
        """
        overrides = ("--distributed.devices", 2) if launcher == "lanewise" else ()
        init_args = {"what": self.fault, "phase": self.phase, "rank": rank, **self.init_args}
        if self.act is not None:
            init_args = {"rank": None, "slow": {"forward": 0.01}}
        config = write_faulty(folder, self.num_workers, **init_args)
        if self.act is not None:
            overrides = (*overrides, "--train.max_steps", 100_000)
        if self.phase == "start":
            overrides = (*overrides, "--distributed.start_seconds", START_SECONDS)
        with ExitStack() as stack:
            variables = {}
            if self.fault == "cgroup":
                variables[GROUP_VARIABLE] = str(stack.enter_context(memory_group(64)))
            if self.disk_mib:
                stack.enter_context(disk(folder / "run", self.disk_mib))
            if launcher == "warm":
                return on_one_machine(config, *overrides, variables=variables)
            if launcher == "ssh":
                (folder / "ssh").mkdir()
                cluster = stack.enter_context(running_ssh(folder / "ssh"))
                return over_ssh(cluster, config, *overrides, act=self.act)
            return on_hosts(config, launcher, *overrides, act=self.act, variables=variables)

    def patterns(self, rank: int, processes: int) -> list[str]:
        """Return what the first error has when a rank of so many processes fails."""
        lanes = 4 // processes
        lane = rank * lanes
        size = STEP_SAMPLES // 4
        sample = self.init_args.get("step", 2) * STEP_SAMPLES + lane * size
        samples = ", ".join(str(sample + one) for one in range(size))
        return [one.format(rank=rank, lane=lane, sample=sample, samples=samples) for one in self.says]


@contextmanager
def disk(path: Path, mib: int) -> Iterator[None]:
    """Mount a disk of so many MiB."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


_MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def memory_group(mib: int) -> Iterator[Path]:
    """Make a control group whose processes may have so many MiB of memory together."""
    is_first_version = _MEMORY_GROUPS.is_dir()
    path = (
        _MEMORY_GROUPS if is_first_version else _MEMORY_GROUPS.parent
    ) / f"lanewise-{uuid.uuid4().hex[:6]}"
    path.mkdir()
    try:
        name = "memory.limit_in_bytes" if is_first_version else "memory.max"
        (path / name).write_text(str(mib << 20))
        yield path
    finally:
        path.rmdir()


def why_no_memory_group() -> str | None:
    """What keeps this machine from making a control group for memory, or None."""
    try:
        with memory_group(64):
            return None
    except OSError as error:
        return f"a control group for memory cannot be made: {error}"


def _raises(phase: str, says: str = "", **options: Any) -> Case:
    return Case(what=f"an exception in {phase}", phase=phase, says=(RAISED, says), **options)


def _dies(fault: str, says: str, phase: str = "forward", **options: Any) -> Case:
    return Case(what=f"{fault} in {phase}", fault=fault, phase=phase, says=(says, rf"\b{phase}\b"), **options)


def _stalls(fault: str, phase: str = "forward", **options: Any) -> Case:
    limit = START_SECONDS if phase == "start" else STALL_SECONDS
    return _dies(fault, r"rank {rank}\b", phase, allowed_seconds=limit + SECONDS_TO_END, **options)


_AT_A_SAVE: Mapping[str, Any] = {"step": 3}
_READING = rf"in sample {{sample}}\n{SAMPLES}"

MATRIX = (
    _raises("forward", SAMPLES),
    _dies("SIGKILL", r"rank {rank}\b"),
    _dies("SIGSEGV", r"rank {rank}\b"),
    _dies("os._exit(3)", r"rank {rank}\b", code=3),
    Case(
        what="more memory than RLIMIT_AS allows",
        phase="forward",
        fault="RLIMIT_AS",
        says=("out of memory", SAMPLES),
        code=2,
    ),
    Case(
        what="more memory than the control group has",
        phase="forward",
        fault="cgroup",
        says=(r"rank {rank}\b", r"\bforward\b"),
    ),
    Case(
        what="SIGKILL of a loader process",
        phase="data",
        fault="SIGKILL",
        says=(r"rank {rank}\b", "DataLoader worker .* (is killed|exited)"),
        num_workers=1,
    ),
    Case(
        what="a full disk",
        phase="save",
        fault="none",
        # It is full while step 12 is saved; steps go on meanwhile, and metrics may be the first to meet it.
        says=("No space left on device", r"\bstep 12\b|metrics.jsonl .*\n?.*after step 1[3-6]\b"),
        init_args={"step": 11, "ballast_mib": 3},
        is_of_all=True,
        disk_mib=8,
    ),
    _stalls("loop"),
    _stalls("SIGSTOP"),
)
"""On one machine, and on two hosts."""

PHASES = (
    _raises("start"),
    _raises("data", _READING),
    _raises("collate", SAMPLES),
    _raises("backward", SAMPLES),
    _raises("evaluation", "in the evaluation after step 4", init_args=_AT_A_SAVE),
    _raises("save", r"\bstep 4\b", init_args=_AT_A_SAVE),
    Case(what="an exception in a loader process", phase="data", says=(RAISED, _READING), num_workers=1),
    _dies("SIGKILL", r"rank {rank}\b", "communication"),
    _stalls("deadlock", "start"),
    _stalls("deadlock", "data"),
    Case(
        what="a loop in a loader process",
        phase="data",
        fault="loop",
        says=(r"rank {rank}\b", r"\bdata\b"),
        num_workers=1,
        allowed_seconds=STALL_SECONDS + SECONDS_TO_END,
    ),
    _stalls("loop in C", "backward"),
    _stalls("SIGSTOP", "communication"),
    _stalls("SIGSTOP", "evaluation", init_args=_AT_A_SAVE),
    _stalls("loop", "save", init_args=_AT_A_SAVE),
)
"""On one machine alone."""


def _kill(node: int, _hosts: object, commands: Sequence[Command]) -> None:
    programs = {pid: line.split()[1] for pid, line in commands[node].pids().items()}
    (launcher,) = [pid for pid, name in programs.items() if Path(name).name in ("torchrun", "lanewise")]
    os.kill(launcher, signal.SIGKILL)


BETWEEN_HOSTS = (
    Case(
        what="a cut cable",
        act=lambda hosts, _: hosts[1].cut(),
        allowed_seconds=STALL_SECONDS + SECONDS_TO_END,
    ),
    Case(
        what="kill -9 of torchrun on the first host",
        says=("which torchrun's agent keeps, is lost",),
        act=partial(_kill, 0),
    ),
    Case(what="kill -9 of torchrun on the second host", says=(r"rank [23]\b",), act=partial(_kill, 1)),
)
"""From outside."""
OVER_SSH = [
    case for case in MATRIX if case.what.removesuffix(" in forward") in ("an exception", "SIGKILL", "SIGSTOP")
]
"""Those that are shown over ssh too, for a worker of each host."""
OF_THE_LAUNCHER = Case(what="kill -9 of lanewise", code=KILLED, act=partial(_kill, 0))
