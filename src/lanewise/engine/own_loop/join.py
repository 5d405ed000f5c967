"""Joins the world in which the user's own loop runs."""

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType

from torch import distributed as dist

from lanewise.config import DistributedConfig
from lanewise.engine.step.lane_error import remedy_for
from lanewise.errors import LanewiseError, WorldError, describe
from lanewise.processes.device.choice import choose_backend, choose_devices
from lanewise.processes.die_with_parent import die_with_parent
from lanewise.processes.watch.heartbeat import OWN_CODE, heartbeat
from lanewise.processes.watch.meeting import Meeting
from lanewise.processes.watch.watch import Watch
from lanewise.processes.world.agreement import require_equal_machines
from lanewise.processes.world.environment import Environment
from lanewise.processes.world.world import World, join_world


def join(environment: Environment, distributed: DistributedConfig) -> tuple[World, Watch]:
    """Join the world that torchrun, srun or mpirun prepared, or be a process alone.

    From now on an error that nobody catches is told to the other processes, which end, too. A process alone
    is not watched: nobody waits for it. In both cases an error of ours is shown without a traceback.

    Collective: every rank must call this.

    Args:
        environment: the place of this process.
        distributed: what the user asked for.

    Returns:
        The world, and the watch of this process, whose `close` leaves the world.

    Raises:
        WorldError: the processes cannot meet, one is in a world already, or `exact` cannot hold on their
            machines.
    """
    if environment.world_size > 1 and dist.is_initialized():
        raise WorldError(
            "this process is in a world of torch.distributed already. Leave init_process_group out, as Lanes "
            "joins it; before a second Lanes in one program call close() of the first."
        )
    devices = choose_devices(distributed.device_type, environment.local_world_size)
    backend = choose_backend(distributed.backend, devices, environment.world_size)
    watch = Watch()
    if environment.master_address:
        die_with_parent(os.getppid())
        watch = Watch(Meeting(environment, distributed.start_seconds))
        watch.begin(distributed)
        sys.excepthook = partial(_explain, watch.show_and_end)
        watch.meet()
    elif sys.excepthook is sys.__excepthook__:
        sys.excepthook = partial(_explain, _show)
    world = join_world(
        environment,
        devices,
        backend,
        None if watch.meeting is None else watch.meeting.store,
        timeout_seconds=distributed.collective_seconds,
    )
    if watch.meeting is not None:
        # Torch has put its own around it, which keeps what it writes.
        sys.excepthook = partial(_explain, watch.show_and_end)
    if distributed.equality == "exact":
        require_equal_machines(world)
    heartbeat.note = (OWN_CODE, None, None)
    return world, watch


def close_at_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Call `close` when the program ends. An error of it ends the program as one that nobody catches does.

    Python would show it, and exit with 0.

    Returns:
        What `atexit.unregister` takes.
    """

    def end() -> None:
        try:
            close()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
            try:
                with suppress(Exception):  # nobody reads it any more
                    sys.stdout.flush()
                sys.excepthook(type(error), error, error.__traceback__)
                sys.stderr.flush()
            finally:
                os._exit(1)

    atexit.register(end)
    return end


def _explain(
    show: Callable[..., None],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Show an error that nobody caught; one of torch with its remedy, as the lanes of a task have it."""
    if remedy := remedy_for(error):
        error.add_note(remedy)
    show(kind, error, traceback)


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Show an error that nobody caught in a process alone."""
    if isinstance(error, LanewiseError):
        sys.stderr.write(f"error: {describe(error)}\n")
    else:
        sys.__excepthook__(kind, error, traceback)
