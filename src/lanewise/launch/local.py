"""Starts the workers on this machine."""

import sys
from dataclasses import dataclass
from typing import final

from lanewise.launch.agent import LOCALHOST, JobFiles, Place, Streams, Workers, open_store, run_workers
from lanewise.launch.launcher import Launcher, count_processes, run_again
from lanewise.launch.membership import Members
from lanewise.processes.watch.failure import Failure


@final
@dataclass(frozen=True)
class LocalLauncher(Launcher):
    """Starts the workers on this machine, and is their agent itself."""

    num_processes: int
    streams: Streams = (0, 1, 2)
    """File descriptors of this process that become the standard streams of every worker."""

    def run(self, workers: Workers, files: JobFiles) -> None:

        def run_once(num_restarts: int) -> Failure | None:
            store, port = open_store(LOCALHOST)
            place = Place(
                num_processes=self.num_processes, world_size=self.num_processes, num_restarts=num_restarts
            )
            return run_workers(workers, place, files, store, port, lambda _: self.streams)

        run_again(workers.signals, self.streams[2], Members(workers.max_restarts), run_once)

    def describe(self) -> str:
        processes = count_processes(self.num_processes)
        return f"{sys.executable} -m lanewise.commands.jobs FILE  # {processes} on this machine"
