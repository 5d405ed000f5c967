"""`lanewise.verify`: the proof from a script or a notebook."""

from collections.abc import Sequence
from typing import Unpack

from lanewise.commands.jobs.api import Sections, config_of
from lanewise.commands.verify.verify import verify as verify_config
from lanewise.commands.verify.verify_report import VerifyReport
from lanewise.config.class_path import refuse_in_import
from lanewise.errors import raised_at_call
from lanewise.processes.world.environment import require_no_world
from lanewise.task import Task


@raised_at_call
def verify(
    task: Task,
    *,
    devices: Sequence[int] = (1, 2),
    num_steps: int = 4,
    resume: bool = False,
    **sections: Unpack[Sections],
) -> VerifyReport:
    """Prove on a task and its data that N devices compute what one computes, as `lanewise verify` does.

    Each number of devices runs in fresh processes of this machine, in `exact` whatever the sections say;
    nothing is written to `train.run_dir`, and this process stays as it is.

    Args:
        task: what would be trained.
        devices: numbers of processes to compare with one.
        num_steps: steps to take, the last one of the first epoch and the next one among them.
        resume: whether each number of devices also goes on from a checkpoint of another one.
        sections: of the configuration, as `lanewise.train` takes them.

    Returns:
        What differs, why, and what to do about it: print it, or read `is_verified` and `findings`.

    Raises:
        ConfigError: lists every mistake in the sections.
        LaunchError: if one process alone fails already.
    """
    refuse_in_import("lanewise.verify")
    require_no_world("verify starts its own processes")
    return verify_config(config_of(task, **sections), devices, task, num_steps=num_steps, resumes=resume)
