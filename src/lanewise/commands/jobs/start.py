"""Starts a job: in this process, in workers that a launcher starts, or in the world that was prepared."""

import logging
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

import cloudpickle

from lanewise.commands.jobs import signals
from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.launchers import (
    batch_job_of,
    is_submitted,
    job_there,
    launcher_of,
    places_of,
    python_path_there,
)
from lanewise.commands.jobs.outcome import Outcome
from lanewise.commands.jobs.rank import join_prepared_world, read_sent_result, run_in_world, tidy_up_at_end
from lanewise.commands.jobs.refused_exit import refusing_exit
from lanewise.config import pin_environment
from lanewise.config.class_path import add_search_path
from lanewise.errors import ConfigError, LaunchError, PreemptedError, text_of
from lanewise.launch import JobFiles, Launcher, LocalLauncher, Workers, fork_client
from lanewise.launch.remote import RemoteLauncher
from lanewise.launch.sbatch import BatchJob
from lanewise.launch.scratch import folder_until_exit, scratch_folder
from lanewise.processes.world.environment import Environment

logger = logging.getLogger(__name__)

_HANGUPS = (Signals.SIGHUP, Signals.SIGQUIT)


def start(job: Job, *, is_fresh: bool) -> Any:
    """Run a job where its configuration says, or in the world that was prepared.

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
    environment = Environment.from_env(os.environ)
    if environment is not None:
        return join_prepared_world(job, environment)
    if job.config.distributed.launcher != "local":
        return _start_on_hosts(job)
    return _start_here(job, is_fresh=is_fresh)


def _start_here(job: Job, *, is_fresh: bool) -> Any:
    """Run a job on this machine."""
    job.require_free()
    distributed = job.config.distributed
    (environment,) = places_of(distributed)
    starts_workers = environment.world_size > 1 or is_fresh
    if not is_fresh:
        pin_environment(distributed.threads, distributed.equality)
    if starts_workers:
        prepare_workers(job.variables)
    logger.info("importing %s", "torch" if job.task is not None else job.config.task.class_path)
    check_here(job)
    job = job.settled()
    if environment.world_size > 1:
        logger.info("starting %d processes", environment.world_size)
    if not starts_workers:
        from lanewise.processes.watch.watch import Watch

        watch = Watch(at_end=tidy_up_at_end)
        watch.begin(distributed)
        try:
            with job.claim():
                return run_in_world(job, environment, folder_until_exit(), watch)
        finally:
            watch.close()
    takes_seconds = ("torchmetrics", "lanewise.hugging_face.task")
    prepare_workers(job.variables, *(name for name in takes_seconds if name in sys.modules))
    with job.claim():
        return _launch_watching(job, launcher_of(job))


def _start_on_hosts(job: Job) -> Any:
    """Run a job on other hosts. What is on them is looked at there, and rank 0 has the run directory."""
    if is_submitted(job.config.distributed):
        batch = _write_batch(job, show=lambda _: None)
        number, exit_code = batch.submit_and_wait()
        return Outcome(batch.file).read(exit_code, batch.log(number))
    _check_for_hosts(job)
    return _launch_watching(job_there(job), launcher_of(job))


def _check_for_hosts(job: Job) -> None:
    """Find what is wrong with a job as far as this machine can."""
    add_search_path(job.config.search_path)
    with refusing_exit():  # it imports the user's modules
        for environment in places_of(job.config.distributed):
            job.check(environment)


def check_here(job: Job) -> None:
    """Find what is wrong with a job that runs on this machine."""
    _check_for_hosts(job)
    (environment,) = places_of(job.config.distributed)
    job.check_devices(environment)


def _write_batch(job: Job, show: Callable[[Any], None]) -> BatchJob:
    """Check a job, and write what its batch job reads, which nobody else may read or write."""
    _check_for_hosts(job)
    job = job.settled()
    batch = batch_job_of(job)
    written = _write_job(job, (job, show), is_remote=True)
    with job.claim():  # or it could not begin there
        batch.write_file(written)
    return batch


def describe_start(job: Job) -> str:
    """Check a job as far as this machine can, and say exactly what `start` would start or submit."""
    _check_for_hosts(job)
    if is_submitted(job.config.distributed):
        return batch_job_of(job).describe()
    return launcher_of(job).describe()


def _launch_watching(job: Job, launcher: Launcher) -> Any:
    """Launch a job, which signals stop in good order if it can."""
    if not job.can_stop:
        return launch(job, launcher, signals_to_end=(*_HANGUPS, Signals.SIGTERM))
    with signals.watching():
        return launch(job, launcher, signals_to_end=_HANGUPS)


def prepare_workers(variables: Mapping[str, str], *modules: str) -> None:
    """Begin to import, in another process, what workers will need, and modules which they may need besides.

    Does nothing the second time.

    Args:
        variables: those of the job.
        modules: their names.
    """
    fork_client(variables).preload(*modules)


def run_command(job: Job, show: Callable[[Any], None], *, is_dry: bool = False) -> None:
    """Start a job for the command line, and show its result once; or say what would be started."""
    if is_dry:
        print(describe_start(job).rstrip())  # noqa: T201 - what the command is for
        return
    environment = Environment.from_env(os.environ)
    if environment is None and is_submitted(job.config.distributed):
        batch = _write_batch(job, show)
        print(batch.tell(batch.submit()))  # noqa: T201 - it is what there is to know
        return
    if environment is None:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("lanewise").setLevel(logging.INFO)
    if job.can_stop:
        (signals.watch_until_exit if environment is None else signals.ignore_at_exit)()
    result = start(job, is_fresh=False)
    if environment is None or environment.rank == 0:
        show(result)


def launch(job: Job, launcher: Launcher, *, signals_to_end: Sequence[Signals] = ()) -> Any:
    """Run a job in workers.

    Args:
        job: what to run.
        launcher: starts them.
        signals_to_end: the signals, besides SIGINT, that end the workers.

    Returns:
        What the job returned on rank 0.

    Raises:
        LaunchError: what the first failing worker said.
    """
    is_remote = isinstance(launcher, RemoteLauncher)
    with scratch_folder() as folder:
        files = JobFiles(folder / "job")
        files.job.write_bytes(_write_job(job, job, is_remote=is_remote))
        if job.can_stop:
            signals.pass_on(files.stop)
        launcher.run(
            Workers(
                module="lanewise.commands.jobs",
                # The file of this process is not for the workers of a trial.
                variables={**job.variables, signals.STOP_FILE_VARIABLE: ""},
                stop_variable=signals.STOP_FILE_VARIABLE if job.can_stop else None,
                max_restarts=job.config.distributed.max_restarts,
                signals=signals_to_end,
            ),
            files,
        )
        if job.can_stop:
            signals.begin()  # and ended: the result is there
        if not files.result.exists():
            raise LaunchError("rank 0 ended with exit code 0 before its job was done; its log may say why.")
        written = files.result.read_bytes()
        result = read_sent_result(written) if is_remote else pickle.loads(written)  # noqa: S301 - from our own worker
        if isinstance(result, PreemptedError):
            raise result
        return result


def launch_unseen(job: Job, num_processes: int) -> Any:
    """Run a job in workers of this machine whose output nobody sees; see `launch`."""
    with Path(os.devnull).open("r+b") as nowhere:
        return launch(job, LocalLauncher(num_processes, (nowhere.fileno(),) * 3))


def _write_job(job: Job, given: object, *, is_remote: bool) -> bytes:
    """Write what `rank.work` and `batch` read: a job, or what has it inside."""
    try:
        pickled = cloudpickle.dumps(given)
    except Exception as error:
        raise ConfigError(
            f"the task cannot be sent to worker processes: {text_of(error)}. Keep what cannot be pickled "
            "(open files, locks, connections) out of it: open them in train_dataset or build_model."
        ) from error
    path = python_path_there(job.config.distributed) if is_remote else sys.path
    return pickle.dumps({"sys.path": path, "job": pickled, "is_remote": is_remote})
