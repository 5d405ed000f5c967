"""Starts the workers on this machine as on any other host, so that the same is looked at."""

import shlex
import socket
import sys
from typing import final

from lanewise.launch.agree import Project
from lanewise.launch.launcher import count_processes
from lanewise.launch.remote import RemoteLauncher
from lanewise.launch.wire import CommandWire, Wire

_COMMAND = (sys.executable, "-P", "-m", "lanewise.launch.host")


@final
class HereLauncher(RemoteLauncher):
    """Has this machine as its only host.

    Args:
        num_processes: how many workers it has.
        project: see `RemoteLauncher`.
    """

    def __init__(self, num_processes: int, project: Project) -> None:
        super().__init__(project)
        self._num_processes = num_processes

    def connect(self) -> list[tuple[str, int, Wire]]:
        """See `RemoteLauncher`."""
        remedy = f"`{shlex.join(_COMMAND)}` must start."
        return [(socket.gethostname(), self._num_processes, CommandWire(_COMMAND, remedy))]

    def describe(self) -> str:
        """See `Launcher`."""
        return f"{shlex.join(_COMMAND)}  # {count_processes(self._num_processes)} in {self.project}"
