"""Runs a job: in this process, in workers that are started for it, or as one worker of a given world."""

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import cloudpickle

from lanewise.config import Equality, pin_environment, pinned_variables
from lanewise.config.class_path import add_search_path
from lanewise.errors import ConfigError, LaunchError, PreemptedError, text_of
from lanewise.jobs import signals
from lanewise.jobs.job import Job
from lanewise.jobs.leave import leave_after, refusing_exit
from lanewise.jobs.scratch import folder_until_exit, keep_sockets_in, scratch_folder
from lanewise.launch import Host, Launcher, LocalLauncher, Workers, fork_server, preload
from lanewise.lifeline import name_process
from lanewise.world.environment import Environment


def start(job: Job, *, is_fresh: bool) -> Any:
    """Run a job on as many processes as its configuration says, or in the world that was prepared.

    Args:
        job: what to run.
        is_fresh: whether even a single process is started for it, so that nothing that this one did before
            can change a result, and nothing is left in it.

    Returns:
        What the job returned on rank 0; in a prepared world, on this rank.

    Raises:
        LaunchError: what the first failing worker said.
    """
    distributed = job.config.distributed
    environment = Environment.from_env(os.environ)
    if environment is not None or not is_fresh:
        pin_environment(distributed.threads, distributed.equality)
    add_search_path(job.config.search_path)
    if environment is not None:
        with ExitStack() as stack:
            with refusing_exit(environment.rank):
                job.check(environment)
            if environment.rank == 0:
                stack.enter_context(job.claim())
            return run_in_world(job, environment, folder_until_exit())
    num_processes = distributed.num_processes or 1
    environment = Environment(world_size=num_processes, local_world_size=num_processes)
    starts_workers = num_processes > 1 or is_fresh
    if starts_workers:
        prepare_workers(distributed.threads, distributed.equality)
    with refusing_exit(rank=0):  # it imports the user's modules
        job.check(environment)
    if starts_workers and "torchmetrics" in sys.modules:  # which takes seconds to import
        preload("torchmetrics")
    with job.claim():
        if num_processes == 1 and not is_fresh:
            return run_in_world(job, environment, folder_until_exit())
        with signals.watching() if job.can_stop else nullcontext():
            return _launch(job, num_processes)


def prepare_workers(threads: int, equality: Equality, *modules: str) -> None:
    """Begin to import, in another process, what workers will need, and modules which they may need besides.

    Does nothing the second time.
    """
    fork_server(pinned_variables(threads, equality)).preload(*modules)


def run_command(job: Job, show: Callable[[Any], None]) -> None:
    """Start a job for the command line, and show its result once; after an error, leave a prepared world."""
    environment = Environment.from_env(os.environ)
    if environment is None:
        if job.can_stop:
            signals.watch_until_exit()
        show(start(job, is_fresh=False))
        return
    if job.can_stop:
        signals.ignore_at_exit()
    try:
        result = start(job, is_fresh=False)
        if environment.rank == 0:
            show(result)
    except BaseException as error:  # noqa: BLE001 - this process ends here
        leave_after(error, environment.rank)


def run_in_world(job: Job, environment: Environment, folder: Path) -> Any:
    """Be one process of the world in which a job runs. Collective: every rank must call this.

    Args:
        job: what to run.
        environment: the place of this process.
        folder: a temporary one, which the caller removes.
    """
    from lanewise.device.allocator import set_malloc
    from lanewise.device.choice import choose_backend, choose_devices
    from lanewise.device.determinism import set_determinism
    from lanewise.loggers import RankLog
    from lanewise.world.world import join_world

    distributed = job.config.distributed
    log = RankLog(job.log_file(environment.rank), environment.rank)
    set_determinism(distributed.equality, distributed.threads)
    devices = choose_devices(distributed.device_type, environment.local_world_size, distributed.device_names)
    if devices[environment.local_rank] == "cpu":
        set_malloc(keeps_freed=job.config.memory.activation_checkpointing is None)
    backend = choose_backend(distributed.backend, devices, environment.world_size)
    world = join_world(environment, devices, backend, folder)
    log.share_warnings(world.is_first)
    try:
        with refusing_exit(environment.rank):
            result = job.run(world)
    except PreemptedError:  # on every rank, in good order
        world.close()
        raise
    world.close()
    return result


def work(file: Path) -> None:
    """Be a worker that `start` started, and never wait for the others after an error.

    Args:
        file: what `_launch` wrote; rank 0 writes the result beside it.
    """
    environment = Environment.from_env(os.environ)
    assert environment is not None
    name_process(f"lanewise-{environment.rank}")
    try:
        written = pickle.loads(file.read_bytes())  # noqa: S301 - from our own parent
        sys.path[:] = written["sys.path"]
        keep_sockets_in(file.parent)
        job = pickle.loads(written["job"])  # noqa: S301 - likewise
        try:
            result = run_in_world(job, environment, file.parent)
        except PreemptedError as error:  # no failure: the agent must not start the processes again
            result = error
        if environment.rank == 0:
            _result_of(file).write_bytes(pickle.dumps(result))
    except BaseException as error:  # noqa: BLE001 - this process ends here
        leave_after(error, environment.rank)


def _launch(job: Job, num_processes: int) -> Any:
    """Start one worker for each device of this machine."""
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
        distributed = job.config.distributed
        variables = pinned_variables(distributed.threads, distributed.equality)
        ending = "SIGINT,SIGHUP,SIGQUIT"
        if job.can_stop:
            stop_file = file.with_suffix(".stop")
            signals.pass_on(stop_file)
            variables[signals.STOP_FILE_VARIABLE] = str(stop_file)
        else:
            ending += ",SIGTERM"
        workers = Workers(
            hosts=[Host("localhost", num_processes)],
            module="lanewise.jobs",
            arguments=[str(file)],
            variables=variables,
            folder=str(folder),
            max_restarts=distributed.max_restarts,
            signals=ending,
        )
        launcher: Launcher = LocalLauncher()
        launcher.launch(workers)
        signals.begin()  # and ended: the result is there
        if not _result_of(file).exists():
            raise LaunchError("rank 0 ended with exit code 0 before its job was done; its log may say why.")
        result = pickle.loads(_result_of(file).read_bytes())  # noqa: S301 - from our own worker
        if isinstance(result, PreemptedError):
            raise result
        return result


def _result_of(file: Path) -> Path:
    return file.with_suffix(".result")
