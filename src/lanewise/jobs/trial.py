"""A step in a process of its own, to see whether memory is enough, for `batch.micro_batch_size: auto`."""

import math
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle

from lanewise.config import RunConfig
from lanewise.jobs.job import Job
from lanewise.jobs.scratch import scratch_folder
from lanewise.jobs.signals import STOP_FILE_VARIABLE
from lanewise.launch import ERROR_FILE_VARIABLE, fork_server

if TYPE_CHECKING:
    from lanewise.task import Task
    from lanewise.world.world import World


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
        except Exception as error:  # noqa: BLE001 - the run itself will say it, unless it is about memory
            return not is_out_of_memory(error)
        return True


def has_room(config: RunConfig, task: "Task | None") -> bool:
    """Tell whether a process of its own, which may be killed, has the memory for a run on one device."""
    with scratch_folder() as folder, Path(os.devnull).open("r+b") as nowhere:
        file = folder / "job"
        job = cloudpickle.dumps(TrialJob(config, task))
        file.write_bytes(pickle.dumps({"sys.path": sys.path, "job": job}))
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment = {**os.environ, **alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name in (STOP_FILE_VARIABLE, ERROR_FILE_VARIABLE):  # of this process
            environment.pop(name, None)
        fork = fork_server({}).run(
            "lanewise.jobs", [str(file)], environment=environment, streams=(nowhere.fileno(),) * 3
        )
        fork.wait(math.inf)
        result = file.with_suffix(".result")
        return result.exists() and bool(pickle.loads(result.read_bytes()))  # noqa: S301 - of our own process
