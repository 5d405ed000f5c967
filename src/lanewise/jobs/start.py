"""Runs a job: in this process, in workers that are started for it, or as one worker of a given world."""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

import cloudpickle

from lanewise.config import Equality, pin_environment, pinned_variables
from lanewise.config.class_path import add_search_path
from lanewise.die_with_parent import die_with_parent, name_process
from lanewise.errors import (
    ConfigError,
    LanewiseError,
    LaunchError,
    PreemptedError,
    WorldError,
    text_of,
)
from lanewise.jobs import signals
from lanewise.jobs.exit import refusing_exit
from lanewise.jobs.job import Job
from lanewise.jobs.scratch import folder_until_exit, keep_sockets_in, remove_all, scratch_folder
from lanewise.launch import Streams, Workers, fork_server, launch_workers
from lanewise.run_record import RunEnd, end_begun
from lanewise.world.environment import Environment

if TYPE_CHECKING:
    from lanewise.watch.failure import Failure
    from lanewise.watch.watch import Watch

_SECONDS_TO_TELL = 10.0
"""How long a process that fails before it joins looks for the others."""
_HANGUPS = (Signals.SIGHUP, Signals.SIGQUIT)


def start(job: Job, *, is_fresh: bool) -> Any:
    """Run a job on as many processes as its configuration says, or in the world that was prepared.

    In a prepared world an error ends this process, and with it all others.

    Args:
        job: what to run.
        is_fresh: whether even a single process is started for it, so that nothing that this one did before
            can change a result, and this one is not changed.

    Returns:
        What the job returned on rank 0; in a prepared world, on this rank.

    Raises:
        LaunchError: what the first failing worker said.
    """
    distributed = job.config.distributed
    environment = Environment.from_env(os.environ)
    if environment is not None:
        return _start_in_prepared_world(job, environment)
    num_processes = distributed.num_processes or 1
    starts_workers = num_processes > 1 or is_fresh
    if not is_fresh:
        pin_environment(distributed.threads, distributed.equality)
    add_search_path(job.config.search_path)
    if starts_workers:
        prepare_workers(distributed.threads, distributed.equality)
    environment = Environment(world_size=num_processes, local_world_size=num_processes)
    with refusing_exit():  # it imports the user's modules
        job.check(environment)
    if not starts_workers:
        from lanewise.watch.watch import Watch

        watch = Watch(at_end=_at_end)
        watch.begin(stall_seconds=distributed.stall_seconds, start_seconds=distributed.start_seconds)
        try:
            with job.claim():
                return run_in_world(job, environment, folder_until_exit(), watch)
        finally:
            watch.close()
    if "torchmetrics" in sys.modules:  # which takes seconds to import
        prepare_workers(distributed.threads, distributed.equality, "torchmetrics")
    with job.claim():
        if not job.can_stop:
            return launch(job, num_processes, signals_to_end=(*_HANGUPS, Signals.SIGTERM))
        with signals.watching():
            return launch(job, num_processes, signals_to_end=_HANGUPS)


def _start_in_prepared_world(job: Job, environment: Environment) -> Any:
    """Be a process that torchrun or srun started."""
    distributed = job.config.distributed
    die_with_parent(os.getppid())
    pin_environment(distributed.threads, distributed.equality)
    from lanewise.watch.meeting import Meeting
    from lanewise.watch.watch import Watch

    watch = Watch(Meeting(environment, distributed.start_seconds), at_end=_at_end)
    try:
        watch.begin(stall_seconds=distributed.stall_seconds, start_seconds=distributed.start_seconds)
        add_search_path(job.config.search_path)
        with refusing_exit(watch):  # it imports the user's modules
            job.check(environment)
        watch.meet()
        with job.claim(is_restarted=watch.is_restarted) if environment.rank == 0 else nullcontext():
            return run_in_world(job, environment, folder_until_exit(), watch)
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
        from lanewise.watch.meeting import Meeting
        from lanewise.watch.watch import Watch

        Watch(Meeting(environment, _SECONDS_TO_TELL)).fail(error)


def _at_end(first: "Failure") -> None:
    """Leave nothing behind but the reason, before a failure ends this process."""
    remove_all()
    end_begun(RunEnd("error", error=first.kind, text=first.text))


def prepare_workers(threads: int, equality: Equality, *modules: str) -> None:
    """Begin to import, in another process, what workers will need, and modules which they may need besides.

    Does nothing the second time.
    """
    fork_server(pinned_variables(threads, equality)).preload(*modules)


def run_command(job: Job, show: Callable[[Any], None]) -> None:
    """Start a job for the command line, and show its result once."""
    environment = Environment.from_env(os.environ)
    if environment is None:
        if job.can_stop:
            signals.watch_until_exit()
        show(start(job, is_fresh=False))
        return
    if job.can_stop:
        signals.ignore_at_exit()
    result = start(job, is_fresh=False)
    if environment.rank == 0:
        show(result)


def run_in_world(job: Job, environment: Environment, folder: Path, watch: "Watch") -> Any:
    """Be one process of the world in which a job runs. Collective: every rank must call this.

    Args:
        job: what to run.
        environment: the place of this process.
        folder: a temporary one, which the caller removes.
        watch: of this process; all have met there.
    """
    from lanewise.device.allocator import set_malloc
    from lanewise.device.choice import choose_backend, choose_devices
    from lanewise.device.determinism import set_determinism
    from lanewise.loggers import RankLog
    from lanewise.world.world import join_world

    distributed = job.config.distributed
    place = f"rank {environment.rank} of {environment.world_size}"
    name_process(f"lanewise: {place}, {job.config.train.run_dir}")
    log = RankLog(job.log_file(environment.rank), environment.rank)
    set_determinism(distributed.equality, distributed.threads)
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
    try:
        with refusing_exit(watch):
            result = job.run(world)
    except PreemptedError:  # on every rank, in good order
        watch.close()
        world.close()
        raise
    watch.close()
    world.close()
    return result


def work(file: Path) -> None:
    """Be a worker that `launch` started. After an error it never waits for the others.

    Args:
        file: what `launch` wrote; rank 0 writes the result beside it.
    """
    from lanewise.watch.meeting import Meeting
    from lanewise.watch.watch import Watch

    environment = Environment.from_env(os.environ)
    assert environment is not None
    watch = Watch(Meeting(environment, timeout_seconds=None), at_end=_at_end)
    try:
        written = pickle.loads(file.read_bytes())  # noqa: S301 - from our own parent
        sys.path[:] = written["sys.path"]
        keep_sockets_in(file.parent)
        job = pickle.loads(written["job"])  # noqa: S301 - likewise
        distributed = job.config.distributed
        watch.begin(stall_seconds=distributed.stall_seconds, start_seconds=distributed.start_seconds)
        watch.meet()
        try:
            result = run_in_world(job, environment, file.parent, watch)
        except PreemptedError as error:  # no failure: the agent must not start the processes again
            result = error
        if environment.rank == 0:
            _result_of(file).write_bytes(pickle.dumps(result))
    except BaseException as error:  # noqa: BLE001 - this process ends here
        watch.fail(error)


def launch(
    job: Job, num_processes: int, *, signals_to_end: Sequence[Signals] = (), streams: Streams = (0, 1, 2)
) -> Any:
    """Run a job in workers on this machine, one for each device.

    Args:
        job: what to run.
        num_processes: how many workers.
        signals_to_end: the signals, besides SIGINT, that end the workers.
        streams: file descriptors of this process that become their standard streams.

    Returns:
        What the job returned on rank 0.

    Raises:
        LaunchError: what the first failing worker said.
    """
    distributed = job.config.distributed
    with scratch_folder() as folder:
        file = folder / "job"
        try:
            pickled = cloudpickle.dumps(job)
        except Exception as error:
            raise ConfigError(
                f"the task cannot be sent to worker processes: {text_of(error)}. Keep what cannot be pickled "
                "(open files, locks, connections) out of it: open them in train_dataset or build_model."
            ) from error
        file.write_bytes(pickle.dumps({"sys.path": sys.path, "job": pickled}))
        variables = pinned_variables(distributed.threads, distributed.equality)
        variables[signals.STOP_FILE_VARIABLE] = ""  # that of this process is not for the workers of a trial
        if job.can_stop:
            stop_file = file.with_suffix(".stop")
            signals.pass_on(stop_file)
            variables[signals.STOP_FILE_VARIABLE] = str(stop_file)
        workers = Workers(
            num_processes=num_processes,
            module="lanewise.jobs",
            arguments=[str(file)],
            variables=variables,
            streams=streams,
            max_restarts=distributed.max_restarts,
            signals=signals_to_end,
        )
        launch_workers(workers)
        if job.can_stop:
            signals.begin()  # and ended: the result is there
        if not _result_of(file).exists():
            raise LaunchError("rank 0 ended with exit code 0 before its job was done; its log may say why.")
        result = pickle.loads(_result_of(file).read_bytes())  # noqa: S301 - from our own worker
        if isinstance(result, PreemptedError):
            raise result
        return result


def _result_of(file: Path) -> Path:
    return file.with_suffix(".result")
