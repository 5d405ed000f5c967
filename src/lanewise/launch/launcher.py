"""What every launcher does: start ranks, show what they print, end them all, and name the first failure.

A launcher over SSH or through a scheduler is a file beside `local.py`. The hosts that it starts ranks on are
arguments of its constructor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Protocol

Streams = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes of one world."""

    num_processes: int
    module: str
    """Each worker does what `python -m MODULE ARGUMENTS` does, in the working directory of the launcher."""
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment. Torchrun's variables tell each worker its rank."""
    streams: Streams = (0, 1, 2)
    """File descriptors of the launcher's process that become the standard streams of every worker."""
    folder: Path
    """Where workers write why they failed. The caller removes it."""
    max_restarts: int = 0
    """How often all of them are started again when one fails."""
    signals: Sequence[Signals]
    """The signals, besides SIGINT, that end the workers and the launch."""


class Launcher(Protocol):
    """Starts the workers of a world in one way: on this machine, over SSH, through a scheduler."""

    def launch(self, workers: Workers) -> None:
        """Run the workers, and wait for all of them.

        What they print goes to this process's standard streams. When this call returns or raises, or when
        this process is killed, all of them have ended.

        Raises:
            LaunchError: what the first failing worker said.
            KeyboardInterrupt: on SIGINT; SystemExit: on the other signals that end the launch.
        """
