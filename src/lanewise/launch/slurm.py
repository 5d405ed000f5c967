"""Starts the workers on the nodes that Slurm has allocated."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import final

from lanewise.launch.agree import Project
from lanewise.launch.launcher import count_processes
from lanewise.launch.remote import RemoteLauncher
from lanewise.launch.sbatch import run_slurm
from lanewise.launch.wire import CommandWire, Wire

ALLOCATION = "SLURM_JOB_ID"
"""The variable that is set inside of an allocation."""

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
class SlurmLauncher(RemoteLauncher):
    """Reaches each node of the allocation by a step of its own.

    Args:
        nodes: their names, with their number of workers.
        project: see `RemoteLauncher`.
        num_starts: likewise.
    """

    def __init__(self, nodes: Sequence[tuple[str, int]], project: Project, num_starts: int) -> None:
        super().__init__(project, num_starts)
        self._nodes = nodes

    def connect(self) -> list[tuple[str, int, Wire]]:
        """See `RemoteLauncher`."""
        remedy = (
            f"`srun --overlap --nodelist=NAME true` must succeed, and {sys.executable} have lanewise there."
        )
        return [
            (name, number, CommandWire(self.command(name), remedy.replace("NAME", name)))
            for name, number in self._nodes
        ]

    def command(self, name: str) -> list[str]:
        """Return the command that starts the process on a node; what is secret goes through its input."""
        # -P: what lies in the user's folder must not take the place of a module.
        return [*_SRUN, f"--nodelist={name}", sys.executable, "-P", "-m", "lanewise.launch.host"]

    def describe(self) -> str:
        """See `Launcher`."""
        return "\n".join(
            f"{shlex.join(self.command(name))}  # {count_processes(number)} in {self.project}"
            for name, number in self._nodes
        )


def allocated_nodes() -> list[str]:
    """Return the names of the nodes of the allocation in which this process is.

    Raises:
        LaunchError: Slurm does not tell them.
    """
    return run_slurm("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
