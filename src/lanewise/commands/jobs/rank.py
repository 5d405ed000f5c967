"""Is one process of the world in which a job runs."""

import os
import pickle
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.refused_exit import refusing_exit
from lanewise.config import pin_environment
from lanewise.config.class_path import add_search_path
from lanewise.errors import LanewiseError, PreemptedError, WorldError
from lanewise.launch import JobFiles
from lanewise.launch.scratch import folder_until_exit, keep_sockets_in, remove_all
from lanewise.processes.die_with_parent import die_with_parent, name_process
from lanewise.processes.watch.typed_json import as_type
from lanewise.processes.world.environment import Environment
from lanewise.runs.record import RunEnd, end_begun

if TYPE_CHECKING:
    from lanewise.processes.watch.failure import Failure
    from lanewise.processes.watch.watch import Watch

_SECONDS_TO_TELL = 10.0
"""How long a process that fails before it joins looks for the others."""


def join_prepared_world(job: Job, environment: Environment) -> Any:
    """Be a process that torchrun, srun or mpirun started. Collective: every rank must call this."""
    distributed = job.config.distributed
    die_with_parent(os.getppid())
    pin_environment(distributed.threads, distributed.equality)
    watch = _watch(environment, distributed.start_seconds)
    try:
        watch.begin(distributed)
        add_search_path(job.config.search_path)
        with refusing_exit(watch):  # it imports the user's modules
            job.check(environment)
            job.check_devices(environment)
        return _meet_and_run(job, environment, folder_until_exit(), watch, claims=environment.rank == 0)
    except PreemptedError:  # on every rank, in good order
        raise
    except BaseException as error:  # noqa: BLE001 - this process ends here
        watch.fail(error)


def fail_in_prepared_world(error: LanewiseError) -> None:
    """End this process with an error that it met before it joined a prepared world, and so end the others.

    Returns where there is no such world, or no way to it.
    """
    with suppress(WorldError):
        environment = Environment.from_env(os.environ)
        if environment is None or environment.world_size == 1:
            return
        _watch(environment, _SECONDS_TO_TELL).fail(error)


def _watch(environment: Environment, timeout_seconds: float | None) -> "Watch":
    """Open the world's store, and watch this process there; see `Meeting`."""
    from lanewise.processes.watch.meeting import Meeting
    from lanewise.processes.watch.watch import Watch

    return Watch(Meeting(environment, timeout_seconds), at_end=tidy_up_at_end)


def _meet_and_run(job: Job, environment: Environment, folder: Path, watch: "Watch", *, claims: bool) -> Any:
    """Meet the others, and run the job as all have settled it; claim it first, if this process is to."""
    watch.meet()
    job = job.settled(watch.agree)
    with job.claim(is_restarted=watch.is_restarted) if claims else nullcontext():
        return run_in_world(job, environment, folder, watch)


def tidy_up_at_end(first: "Failure") -> None:
    """Leave nothing behind but the reason, before a failure ends this process."""
    remove_all()
    end_begun(RunEnd("error", error=first.kind, text=first.text))


def run_in_world(job: Job, environment: Environment, folder: Path, watch: "Watch") -> Any:
    """Be one process of the world in which a job runs. Collective: every rank must call this.

    Args:
        job: what to run.
        environment: the place of this process.
        folder: a temporary one, which the caller removes.
        watch: of this process; all have met there.
    """
    from lanewise.processes.device.allocator import set_malloc
    from lanewise.processes.device.choice import choose_backend, choose_devices
    from lanewise.processes.device.determinism import set_determinism
    from lanewise.processes.world.agreement import require_equal_machines
    from lanewise.processes.world.world import join_world
    from lanewise.runs.loggers import RankLog

    distributed = job.config.distributed
    if environment.world_size > 1:  # else the user finds it by the command line
        rank, world_size = environment.rank, environment.world_size
        name_process(f"lanewise: rank {rank} of {world_size}, {job.config.train.run_dir}")
    log = RankLog(job.log_file(environment.rank), environment.rank)
    set_determinism(distributed.equality, distributed.threads, trains=job.trains)
    devices = choose_devices(distributed.device_type, environment.local_world_size, distributed.device_names)
    if devices[environment.local_rank] == "cpu":
        set_malloc(keeps_freed=job.config.memory.activation_checkpointing is None)
    backend = choose_backend(distributed.backend, devices, environment.world_size)
    world = join_world(
        environment,
        devices,
        backend,
        None if watch.meeting is None else watch.meeting.store,
        folder=folder,
        timeout_seconds=distributed.collective_seconds,
        is_restarted=watch.is_restarted,
    )
    log.share_warnings(world.is_first)
    if distributed.equality == "exact":
        require_equal_machines(world)
    try:
        with refusing_exit(watch):
            result = job.run(world)
    except PreemptedError:  # on every rank, in good order
        watch.close(world.close)
        raise
    watch.close(world.close)
    return result


def work(file: Path) -> None:
    """Be a worker that a launcher started. After an error it never waits for the others.

    Args:
        file: what `lanewise.commands.jobs.start` wrote; rank 0 writes the result beside it.
    """
    environment = Environment.from_env(os.environ)
    assert environment is not None
    try:
        watch = _watch(environment, None)
    except WorldError as error:  # the launcher, which keeps the store, has ended, and says why
        from lanewise.processes.watch.watch import Watch

        Watch(at_end=tidy_up_at_end).fail(error)
    try:
        written = pickle.loads(file.read_bytes())  # noqa: S301 - from our own parent
        is_remote = written["is_remote"]
        sys.path[:] = [*written["sys.path"], *(sys.path if is_remote else [])]
        keep_sockets_in(file.parent)
        job = pickle.loads(written["job"])  # noqa: S301 - likewise
        watch.begin(job.config.distributed)
        if is_remote:  # the launcher has looked neither at these devices nor at the run directory
            job.check_devices(environment)
        claims = is_remote and environment.rank == 0
        try:
            result = _meet_and_run(job, environment, file.parent, watch, claims=claims)
        except PreemptedError as error:  # no failure: the agent must not start the processes again
            result = error
        if environment.rank == 0:
            written = write_sent_result(result) if is_remote else pickle.dumps(result)
            JobFiles(file).result.write_bytes(written)
    except BaseException as error:  # noqa: BLE001 - this process ends here
        watch.fail(error)


@dataclass(frozen=True)
class _Sent:
    """A result that goes to another machine."""

    stopped: str | None
    result: Any


def write_sent_result(result: Any) -> bytes:
    """Write a result for a process on another machine: without pickle, which could run code there."""
    from lanewise.processes.world.tree_message import dump_tree

    stopped = str(result) if isinstance(result, PreemptedError) else None
    return dump_tree(vars(_Sent(stopped, None if stopped else result)))


def read_sent_result(written: bytes) -> Any:
    """Undo what a worker on another host did; what stopped the run is returned as a PreemptedError.

    Raises:
        WorldError: if something else wrote it.
    """
    from lanewise.processes.world.tree_message import load_tree

    try:
        sent = as_type(load_tree(written), _Sent)
    except ValueError:
        raise WorldError("what the first host sent is no result of a job.") from None
    return sent.result if sent.stopped is None else PreemptedError(sent.stopped)
