"""`lanewise.plan`: what a run needs, from a script or a notebook."""

from collections.abc import Sequence
from typing import Unpack

from lanewise.commands.jobs.api import Sections, config_of
from lanewise.commands.plan.plan import plan as plan_config
from lanewise.commands.plan.result import Plan
from lanewise.config.class_path import refuse_in_import
from lanewise.errors import raised_at_call
from lanewise.processes.device.random_state import kept_random_state
from lanewise.processes.world.environment import require_no_world
from lanewise.task import Task


@raised_at_call
def plan(
    task: Task,
    *,
    devices: Sequence[int] = (1, 2, 4, 8),
    memory_gib: float | None = None,
    **sections: Unpack[Sections],
) -> Plan:
    """Say what a run needs under every reducer before it is trained, as `lanewise plan` does.

    One lane is run in this process on a copy of the task, on tensors without memory where the task lets it.

    Args:
        task: what would be trained.
        devices: numbers of devices.
        memory_gib: memory of a device, in GiB; None: nobody asks whether a row fits.
        sections: of the configuration, as `lanewise.train` takes them; its reducer and devices do not matter.

    Returns:
        A row for each reducer and number of devices: print it, or read `rows`.

    Raises:
        ConfigError: lists every mistake in the sections; or the loss is of all samples of a step.
        DataError: if the dataset is empty.
        TaskError: if the lane cannot be trained.
    """
    refuse_in_import("lanewise.plan")
    require_no_world("plan runs in one process")
    memory_bytes = None if memory_gib is None else memory_gib * 2**30
    with kept_random_state():
        return plan_config(config_of(task, **sections), devices, task, memory_bytes=memory_bytes)
