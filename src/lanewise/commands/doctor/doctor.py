"""Looks at hosts, measures between those that can compute together, and judges."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lanewise.commands.doctor.doctor_report import DoctorReport, HostRow
from lanewise.commands.doctor.judge import Clock, judge_clocks, judge_links
from lanewise.commands.doctor.measure import MeasureJob, Measurement
from lanewise.commands.jobs.launchers import only_on, remote_launcher_of
from lanewise.commands.jobs.start import check_for_hosts, launch
from lanewise.commands.jobs.train import TrainJob
from lanewise.config import (
    BatchConfig,
    ClassConfig,
    DistributedConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from lanewise.errors import LanewiseError, LaunchError
from lanewise.launch.agree import Agreement, Fault
from lanewise.launch.wire import RemoteHost
from lanewise.processes.device.choice import count_accelerators

_HERE = "this machine"
_OPTIMIZER = OptimizerConfig(class_path="torch.optim.SGD")
"""This optimizer stands for any: nothing is trained."""
_NUM_CALLS = 5
_SECONDS_WITHOUT_PROGRESS = 60.0
"""The measurement ends after this time: something lets nothing through."""
_KEEPS_FROM_COMPUTING = ("connection", "folder", "versions", "network")
"""Kinds of faults with which a host takes part in no measurement."""


def doctor(
    config: RunConfig | None,
    expected_gbit: float | None = None,
    show: Callable[[str], object] = lambda _: None,
) -> DoctorReport:
    """Look at the hosts of a configuration, which without others are this machine, and leave nothing there.

    Args:
        config: what would be trained; None: this machine with all its devices.
        expected_gbit: what every link must reach, in gigabits per second.
        show: takes what is being done.

    Raises:
        ConfigError: lists what `train` would refuse in the configuration before it starts anything.
    """
    job = TrainJob(config or _configuration())
    if config is not None:
        check_for_hosts(job)
    launcher = remote_launcher_of(job)
    project = replace(launcher.project, elastic=None)  # all of them are looked at
    if config is None:
        project = replace(project, sources={}, run_dir=None)
    launcher = replace(launcher, project=project)
    with launcher.hosts() as (hosts, _):
        show("looking at the hosts")
        agreement = Agreement(hosts, project)
        agreement.check(at_all=True)
        clocks = {host.name: clock for host, clock in agreement.ask("clock", _read_clock).items()}
        notes = list(_names_that_lead_nowhere(agreement))
    faults = [*agreement.faults, *judge_clocks(clocks, _HERE)]
    broken = {fault.host for fault in faults if fault.kind in _KEEPS_FROM_COMPUTING}
    sound = [host for host in hosts if host.name not in broken]
    if broken:
        notes.append(f"nothing is measured to {', '.join(host.name for host in hosts if host not in sound)}")
    names = [host.name for host in sound]
    measured = None
    if sound:
        show("measuring between the hosts")
        try:
            measured = _measure(job.config, sound)
        except LanewiseError as error:
            faults.append(Fault(_host_of(error, sound), "measurement", str(error)))
    ends = (
        names if len(names) > 1 else [f"rank {rank}" for host in sound for rank in range(host.num_processes)]
    )
    if measured:
        faults += _judge(measured, names, ends, expected_gbit)
    equipment = dict(zip(names, measured.equipment, strict=True)) if measured else {}
    rows = [
        HostRow(
            name=host.name,
            hello=host.hello if host.has_said_hello else None,
            address=" ".join(agreement.sites[host]).rstrip() if host in agreement.sites else None,
            clock=clocks.get(host.name),
            equipment=equipment.get(host.name),
        )
        for host in hosts
    ]
    return DoctorReport(hosts=rows, faults=faults, notes=notes, measured=measured, ends=ends)


def _configuration() -> RunConfig:
    """Return one that uses all devices of this machine, for no task."""
    devices = max(1, count_accelerators())
    return RunConfig(
        task=ClassConfig(class_path="none"),
        batch=BatchConfig(global_batch_size=devices, micro_batch_size=1),
        train=TrainConfig(run_dir="none", max_steps=1),
        optimizer=_OPTIMIZER,
        distributed=DistributedConfig(devices=devices),
    )


def _read_clock(host: RemoteHost) -> Clock:
    """Compare a clock with that of this machine, by the fastest of a few calls."""
    found = []
    for _ in range(_NUM_CALLS):
        begin, there, end = time.time(), host.call("clock"), time.time()
        found.append(Clock(there - (begin + end) / 2, (end - begin) / 2))
    return min(found, key=lambda clock: clock.uncertainty_seconds)


def _names_that_lead_nowhere(agreement: Agreement) -> Iterator[str]:
    """Yield which hosts do not know the name of one, as torchrun and srun may need it."""
    names = [host.hello.name for host in agreement.answering]
    for host, unknown in agreement.ask("names", lambda host: host.call("resolve", names=names)).items():
        if unknown:
            yield (
                f"{', '.join(unknown)} leads to no address on {host.name}: torchrun and srun may need it "
                "(/etc/hosts, DNS), lanewise's own launchers use addresses"
            )


def _measure(config: RunConfig, hosts: Sequence[RemoteHost]) -> Measurement:
    """Run the job that measures on some of the hosts, whatever their code and run_dir.

    Raises:
        LanewiseError: what failed there.
    """
    distributed = replace(
        only_on([host.name for host in hosts], config.distributed),
        equality="close",
        max_restarts=0,
        start_seconds=_SECONDS_WITHOUT_PROGRESS,
        stall_seconds=_SECONDS_WITHOUT_PROGRESS,
    )
    job = MeasureJob(
        replace(config, distributed=distributed, optimizer=_OPTIMIZER),
        sizes=tuple(host.num_processes for host in hosts),
        needs_equal_machines=config.distributed.equality == "exact",
    )
    launcher = remote_launcher_of(job)
    without_sources = replace(launcher, project=replace(launcher.project, sources={}))
    return Measurement.from_tree(launch(job, without_sources))


def _host_of(error: LanewiseError, hosts: Sequence[RemoteHost]) -> str:
    """Return the name of the host of the rank that failed, or of all hosts."""
    rank = error.rank if isinstance(error, LaunchError) else None
    has_failed = [host.name for host in hosts if rank is not None and rank >= host.first_rank]
    return has_failed[-1] if has_failed else ", ".join(host.name for host in hosts)


def _judge(
    measured: Measurement, hosts: Sequence[str], ends: Sequence[str], expected_gbit: float | None
) -> Iterator[Fault]:
    """Yield what is wrong with what was measured."""
    if measured.differing is not None:
        yield Fault(", ".join(hosts), "machines", measured.differing)
    if len(hosts) > 1 or expected_gbit is not None:  # devices of one machine need not be joined alike
        equipment = measured.equipment if measured.backend == "gloo" and len(hosts) > 1 else ()
        yield from judge_links(measured.links, ends, equipment, expected_gbit)
