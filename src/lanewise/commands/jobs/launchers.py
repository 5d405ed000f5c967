"""Which launcher starts a job, and what of this machine the job means on other hosts."""

import hashlib
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.provenance import INSTALLED, own_modules
from lanewise.commands.jobs.rank import read_sent_result
from lanewise.commands.jobs.run_dir_pattern import is_pattern
from lanewise.config import DistributedConfig
from lanewise.config.launchers import LauncherName, SSHConfig, read_hosts
from lanewise.config.load import dump_config
from lanewise.errors import ConfigError, PreemptedError
from lanewise.launch import Launcher, LocalLauncher
from lanewise.launch.agree import Project
from lanewise.launch.command import slurm_launcher, ssh_launcher
from lanewise.launch.kubernetes import CONFIG_FILE, KubernetesLauncher, manifest
from lanewise.launch.membership import Elastic
from lanewise.launch.ray import RayLauncher
from lanewise.launch.sbatch import ALLOCATION, BatchJob, allocated_nodes
from lanewise.processes.world.environment import Environment

J = TypeVar("J", bound=Job)
Hosts: TypeAlias = Sequence[tuple[str, int]]
"""The name of each host, if it is known, and its number of processes."""


def places_of(distributed: DistributedConfig) -> Iterator[Environment]:
    """Yield the place of the first process of each host.

    Raises:
        ConfigError: the hosts cannot be read, or contradict `distributed.devices`.
    """
    counts = [count for _, count in _hosts_of(distributed)]
    first_rank = 0
    for count in counts:
        yield Environment(first_rank, 0, sum(counts), count)
        first_rank += count


def launcher_of(job: Job) -> Launcher:
    """Return the launcher of a job whose classes have been imported here."""
    return _LAUNCHERS[job.config.distributed.launcher](job, list(_hosts_of(job.config.distributed)))


def _local(_job: Job, hosts: Hosts) -> Launcher:
    return LocalLauncher(hosts[0][1])


def _ssh(job: Job, hosts: Hosts) -> Launcher:
    return ssh_launcher(hosts, job.config.distributed.ssh.python or sys.executable, _project(job))


def _slurm(job: Job, hosts: Hosts) -> Launcher:
    num_starts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return slurm_launcher(hosts, _project(job), num_starts)


def _ray(job: Job, hosts: Hosts) -> Launcher:
    distributed = job.config.distributed
    types = {name.partition(":")[0] for name in distributed.device_names} or {distributed.device_type}
    takes_gpus = None if types == {"auto"} else types == {"cuda"}
    return RayLauncher(
        project=_project(job),
        num_nodes=len(hosts),
        num_processes=hosts[0][1],
        num_cores=_num_cores(job),
        num_gpus=distributed.num_devices or 1,
        takes_gpus=takes_gpus,
    )


def _kubernetes(job: Job, _hosts: Hosts) -> Launcher:
    return KubernetesLauncher(manifest(job.config, job.program(CONFIG_FILE), dump_config(job.config)))


_LAUNCHERS: Mapping[LauncherName, Callable[[Job, Hosts], Launcher]] = {
    "local": _local,
    "ssh": _ssh,
    "slurm": _slurm,
    "ray": _ray,
    "kubernetes": _kubernetes,
}


def _hosts_of(distributed: DistributedConfig) -> Iterator[tuple[str, int]]:
    """Yield the name of each host, if it is known, and its number of processes."""
    count = distributed.num_processes or 1
    if distributed.launcher == "slurm" and not is_submitted(distributed):
        names = allocated_nodes()
        if distributed.nodes not in (None, len(names)):
            raise ConfigError(
                f"distributed.nodes contradicts the allocation of Slurm: got {distributed.nodes}, and "
                f"{len(names)} in it. Leave nodes out inside of an allocation."
            )
        yield from [(name, count) for name in names]
        return
    if distributed.launcher != "ssh":
        yield from [("", count)] * (distributed.nodes or 1)
        return
    for name, num_devices in read_hosts(distributed.hosts, distributed.hostfile):
        if num_devices is None:
            yield name, count
            continue
        if distributed.is_one_process:
            raise ConfigError(
                f"distributed.reducer {distributed.reducer} drives all devices of a host from one process: "
                f"got {name}:{num_devices}. Write {name} alone, and distributed.devices={num_devices}."
            )
        if distributed.num_devices not in (None, num_devices):
            raise ConfigError(
                f"distributed.devices contradicts distributed.hosts: got {distributed.num_devices}, and "
                f"{num_devices} for {name}. Remove one of them."
            )
        yield name, num_devices


def is_submitted(distributed: DistributedConfig) -> bool:
    """Tell whether a job becomes a batch job of Slurm, as there is no allocation to run in."""
    return distributed.launcher == "slurm" and ALLOCATION not in os.environ


def batch_job_of(job: Job) -> BatchJob:
    """Return the batch job that runs a job; its files are in the run directory, which the nodes share."""
    config = job.config
    hosts = list(_hosts_of(config.distributed))
    num_processes = hosts[0][1]
    return BatchJob(
        file=Path(config.train.run_dir, "slurm", f"{secrets.token_hex(4)}.job").absolute(),
        cwd=Path.cwd(),
        num_nodes=len(hosts),
        num_processes=num_processes,
        num_cores=_num_cores(job),
        seconds_to_save=math.ceil(config.checkpoint.preempt_seconds),
        slurm=config.distributed.slurm,
    )


def _num_cores(job: Job) -> int:
    """Return how many cores the processes of a host need, with those that load data."""
    distributed = job.config.distributed
    return (distributed.num_processes or 1) * (distributed.threads + job.config.data.num_workers)


def job_there(job: J) -> J:
    """Return a job as the hosts have it: with the search path there."""
    search_path = job.config.search_path
    if search_path is None:
        return job
    there = _path_there(search_path, job.config.distributed)
    return replace(job, config=replace(job.config, search_path=there))


def python_path_there(distributed: DistributedConfig) -> list[str]:
    """Return where the hosts look for the user's modules, besides what is installed there."""
    places = (*INSTALLED, str(Path(__file__).parents[3]))
    installed = tuple(str(Path(place).resolve()) for place in places)
    own = [str(Path(entry).resolve()) for entry in sys.path]
    return [_path_there(entry, distributed) for entry in own if not entry.startswith(installed)]


def _project(job: Job) -> Project:
    """Describe what every host must have for a job."""
    config = job.config
    distributed = config.distributed
    search_path = config.search_path or str(Path.cwd())
    ssh = _ssh_options(distributed)
    given = ssh.variables
    if unset := [name for name, value in given.items() if value is None and name not in os.environ]:
        raise ConfigError(
            f"distributed.ssh.variables takes {', '.join(unset)} from this environment, where it is not set. "
            "Set it, or write its value."
        )
    variables = {name: os.environ[name] if value is None else value for name, value in given.items()}
    return Project(
        folder=ssh.folder or str(Path.cwd()),
        variables=variables,
        pins=job.variables,
        search_path=_path_there(search_path, distributed),
        sources=_sources_below(search_path),
        run_dir=None if job.shared_folder is None else str(job.shared_folder),
        limit_seconds=distributed.lost_seconds,
        start_seconds=distributed.start_seconds,
        elastic=_elastic(job) if job.can_stop else None,
    )


def _elastic(job: Job) -> Elastic | None:
    """Describe what a run needs of its hosts, if these may come and go."""
    distributed = job.config.distributed
    num_nodes, hosts = distributed.min_nodes, list(_hosts_of(distributed))
    if num_nodes is None:
        return None
    if num_nodes > len(hosts):
        raise ConfigError(
            f"distributed.min_nodes is more than there are hosts: got {num_nodes}, and {len(hosts)} hosts. "
            "Use a smaller min_nodes, or name more hosts."
        )
    fewest = sum(sorted(number for _, number in hosts)[:num_nodes])
    if distributed.kind.shards_weights and fewest < 2:
        raise ConfigError(
            f"distributed.reducer fsdp needs two processes at least: got distributed.min_nodes={num_nodes}, "
            "with which one may be left. Use min_nodes=2, or reducer=ddp."
        )
    if is_pattern(job.config.train.run_dir):
        raise ConfigError(
            "distributed.min_nodes needs a run_dir that all starts have: got the pattern "
            f"{job.config.train.run_dir}. Name one without {{time}} or {{number}}."
        )
    types = {name.partition(":")[0] for name in distributed.device_names} or {distributed.device_type}
    return Elastic(
        min_hosts=num_nodes,
        max_processes=job.config.batch.num_lanes,
        see=("lanewise.commands.jobs.see", distributed.equality, *types, job.config.train.run_dir),
        was_stopped=lambda written: isinstance(read_sent_result(written), PreemptedError),
        hosts=lambda: list(_hosts_of(distributed)),
    )


def _ssh_options(distributed: DistributedConfig) -> SSHConfig:
    """Return what the launcher ssh uses on each host; with another launcher nothing is special there."""
    return distributed.ssh if distributed.launcher == "ssh" else SSHConfig()


def _path_there(path: str, distributed: DistributedConfig) -> str:
    """Return what a path is on the hosts: the same below their working directory, or as it is."""
    folder = _ssh_options(distributed).folder
    here = Path.cwd().resolve()
    if folder is None or not Path(path).is_relative_to(here):
        return path
    return str(Path(folder, Path(path).relative_to(here)))


def _sources_below(search_path: str) -> dict[str, str]:
    """Return the SHA-256 of the modules below a folder that were imported, by their paths in it."""
    files = {Path(file) for _, file in own_modules(object, search_path)}
    return {
        str(file.relative_to(search_path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files)
        if file.is_relative_to(search_path) and file.is_file()
    }
