"""Starts the workers on hosts that a command reaches: ssh, or srun inside of an allocation."""

import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import final

from lanewise.launch.agree import Project
from lanewise.launch.launcher import count_processes
from lanewise.launch.remote import RemoteLauncher
from lanewise.launch.wire import PYTHON_HERE, CommandWire, Wire, host_program

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
"""The system's ssh, with the user's keys and configuration; it asks for nothing, as nobody answers."""

# The workers choose among all cores of the job; MPI is not used, and the step is no obstacle to another one.
_SRUN = (
    "srun",
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",
    "--overlap",
    "--cpu-bind=none",
    "--mpi=none",
)


@final
@dataclass(kw_only=True)
class CommandLauncher(RemoteLauncher):
    """Reaches each host by a command."""

    command_of: Callable[[str], Sequence[str]]
    """Returns the command for a host, by its name; what is secret goes through the command's input."""
    remedy: str
    """What must be so that it reaches the host NAME."""

    def connect(self, names: Collection[str] | None = None) -> list[tuple[str, int, Wire]]:
        return [
            (name, number, CommandWire(self.remedy.replace("NAME", name), self.command_of(name)))
            for name, number in self.hosts_named
            if names is None or name in names
        ]

    def describe(self) -> str:
        return "\n".join(
            f"{shlex.join(self.command_of(name))}  # {count_processes(number)} in {self.project}"
            for name, number in self.hosts_named
        )


def ssh_launcher(hosts: Sequence[tuple[str, int]], python: str, project: Project) -> CommandLauncher:
    """Reach hosts by the names that the user would give to ssh; `python` is the interpreter there."""
    return CommandLauncher(
        project=project,
        hosts_named=hosts,
        command_of=lambda name: [*_SSH, name, f"exec {shlex.join(host_program(python))}"],
        remedy=f"`ssh NAME true` must succeed without a question, and {python} have lanewise there.",
    )


def slurm_launcher(hosts: Sequence[tuple[str, int]], project: Project, num_starts: int) -> CommandLauncher:
    """Reach each node of the allocation by a step of its own; see `RemoteLauncher` for `num_starts`."""
    return CommandLauncher(
        project=project,
        num_starts=num_starts,
        hosts_named=hosts,
        command_of=lambda name: [*_SRUN, f"--nodelist={name}", *PYTHON_HERE],
        remedy="`srun --overlap --nodelist=NAME true` must succeed, and "
        f"{sys.executable} have lanewise there.",
    )
