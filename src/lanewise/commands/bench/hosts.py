"""Measures on the hosts of the configuration, where a mode runs after the other and takes its turns alone."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lanewise.commands.bench.job import BenchJob, BenchTurn, First
from lanewise.commands.bench.modes import GRADES, Configure, Mode, overrides_of
from lanewise.commands.bench.row import BenchRow
from lanewise.commands.bench.training import Trained, TrainingJob
from lanewise.commands.bench.warm_mode import Show
from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.launchers import is_submitted, job_there, launcher_of, places_of
from lanewise.commands.jobs.start import check_for_hosts, launch
from lanewise.config import REDUCERS, ReducerName, RunConfig
from lanewise.config.launchers import read_hosts
from lanewise.errors import ConfigError, LanewiseError, text_of
from lanewise.launch.remote import RemoteLauncher


def modes_on_hosts(reducers: Sequence[ReducerName], config: RunConfig) -> list[Mode]:
    """Return each reducer that several hosts can have, on all of them, and one device of the first host.

    Raises:
        ConfigError: the launcher starts nothing from here that would answer.
    """
    distributed = config.distributed
    if is_submitted(distributed) or not isinstance(launcher_of(BenchJob(config)), RemoteLauncher):
        raise ConfigError(
            "bench measures on hosts that a launcher reaches from here: got distributed.launcher "
            f"{distributed.launcher}. Run it there with --distributed.launcher local, or in an allocation."
        )
    (place, *_) = places_of(distributed)
    sizes = {"processes": place.world_size} | ({"device": 1} if distributed.launcher == "ssh" else {})
    modes = [
        Mode(reducer, sizes[REDUCERS[reducer].runs_on], equality)
        for reducer in reducers
        for equality in GRADES
        if REDUCERS[reducer].runs_on in sizes
    ]
    return sorted(modes, key=lambda mode: mode.kind.runs_on != "device")


def measure_on_hosts(rows: Mapping[Mode, BenchRow], configure: Configure, end: float, show: Show) -> None:
    """Measure one mode after the other, each in an equal part of the time."""
    for number, (mode, row) in enumerate(rows.items()):
        show(f"running {mode}")
        seconds = (end - time.monotonic()) / (len(rows) - number)
        try:
            found = _launch_there(BenchJob(_config_there(mode, configure), seconds=seconds))
        except LanewiseError as error:
            row.failure = text_of(error)
            continue
        row.firsts = [First(**first) for first in found["firsts"]]
        row.rounds = [[BenchTurn(**turn) for turn in turns] for turns in found["rounds"]]


def train_there(mode: Mode, configure: Configure, num_steps: int) -> Trained:
    """Train a mode for so many steps on the hosts, and evaluate the model."""
    return Trained(**_launch_there(TrainingJob(_config_there(mode, configure), num_steps=num_steps)))


def _launch_there(job: Job) -> Any:
    check_for_hosts(job)
    return launch(job_there(job), launcher_of(job))


def _config_there(mode: Mode, configure: Configure) -> RunConfig:
    config = configure(list(overrides_of(mode, configure([]).distributed)))
    return _on_first_host(config) if mode.kind.runs_on == "device" else config


def _on_first_host(config: RunConfig) -> RunConfig:
    """Return the same run on one device of its first host."""
    distributed = config.distributed
    first = read_hosts(distributed.hosts, distributed.hostfile)[0].name
    return replace(config, distributed=replace(distributed, hosts=(first,), hostfile=None, devices=1))
