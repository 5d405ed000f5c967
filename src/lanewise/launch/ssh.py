"""Starts the workers on hosts that ssh reaches."""

import shlex
from collections.abc import Sequence
from typing import final

from lanewise.launch.agree import Project
from lanewise.launch.launcher import count_processes
from lanewise.launch.remote import RemoteLauncher
from lanewise.launch.wire import CommandWire, Wire

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
"""The system's ssh, with the user's keys and configuration; it asks for nothing, as nobody answers."""


@final
class SSHLauncher(RemoteLauncher):
    """Reaches each host by ssh.

    Args:
        hosts: by the names that the user would give to ssh, with their number of workers.
        python: the interpreter there.
        project: see `RemoteLauncher`.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]], python: str, project: Project) -> None:
        super().__init__(project)
        self._hosts = hosts
        self._python = python

    def connect(self) -> list[tuple[str, int, Wire]]:
        """See `RemoteLauncher`."""
        remedy = f"`ssh NAME true` must succeed without a question, and {self._python} have lanewise there."
        return [
            (name, number, CommandWire(self.command(name), remedy.replace("NAME", name)))
            for name, number in self._hosts
        ]

    def command(self, name: str) -> list[str]:
        """Return the command that starts the process on a host; what is secret goes through its input."""
        # -P: what lies in the user's folder must not take the place of a module.
        return [*_SSH, name, f"exec {shlex.quote(self._python)} -P -m lanewise.launch.host"]

    def describe(self) -> str:
        """See `Launcher`."""
        return "\n".join(
            f"{shlex.join(self.command(name))}  # {count_processes(number)} in {self.project}"
            for name, number in self._hosts
        )
