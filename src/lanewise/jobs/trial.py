"""A step in a process of its own, to see whether memory is enough, for `batch.micro_batch_size: auto`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from lanewise.config import RunConfig
from lanewise.errors import LaunchError
from lanewise.jobs.job import Job
from lanewise.jobs.start import launch

if TYPE_CHECKING:
    from lanewise.task import Task
    from lanewise.world.world import World


@final
@dataclass(frozen=True)
class TrialJob(Job):
    """Takes the steps of its configuration; the result is whether there was memory for them."""

    def run(self, world: "World") -> bool:
        """See `Job`."""
        from lanewise.engine.engine import build_engine
        from lanewise.engine.step.lane import is_out_of_memory

        try:
            for _ in build_engine(self.config, world, self.task).steps():
                pass
        except Exception as error:  # noqa: BLE001 - the run itself will raise it, unless it is about memory
            return not is_out_of_memory(error)
        return True


def has_room(config: RunConfig, task: "Task | None") -> bool:
    """Tell whether a process of its own, which may be killed, has the memory for a run on one device."""
    with Path(os.devnull).open("r+b") as nowhere:
        try:
            return bool(launch(TrialJob(config, task), 1, streams=(nowhere.fileno(),) * 3))
        except LaunchError:
            return False
