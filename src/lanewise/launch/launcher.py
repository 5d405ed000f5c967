"""What every launcher does: start ranks, show what they print, end them all, and name the first failure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

LAUNCHER_PID_VARIABLE = "LANEWISE_LAUNCHER_PID"
"""Environment variable that tells a worker the process that launched it."""


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it gets."""

    name: str
    num_processes: int


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes of one world."""

    hosts: Sequence[Host]
    """In the order of ranks."""
    module: str
    """Each worker does what `python -m MODULE ARGUMENTS` does, in the working directory of the launcher."""
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment; torchrun's variables tell each worker its rank."""
    folder: str
    """Gets the launcher's files, in which workers say why they failed; the caller removes it."""
    max_restarts: int = 0
    """How often all of them are started again when one fails."""
    signals: str
    """Those that end the workers and the launch, by name, with commas."""


class Launcher(Protocol):
    """Starts the workers of a world in one way: on this machine, over SSH, through a scheduler."""

    def launch(self, workers: Workers) -> None:
        """Run the workers, and wait for all of them.

        What they print goes to this process's standard streams. When this call returns or raises, none of
        them is left; nor when this process is killed.

        Raises:
            LaunchError: what the first failing worker said.
            KeyboardInterrupt: on SIGINT; SystemExit: on the other signals that end the launch.
        """
