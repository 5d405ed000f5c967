"""Runs one layout after the other, compares them, and reports the causes of their differences."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lanewise.commands.jobs.start import prepare_workers, start
from lanewise.commands.verify import MODULES
from lanewise.commands.verify.diagnose import diagnose, notes
from lanewise.commands.verify.evidence import Evidence, LayoutResult
from lanewise.commands.verify.job import RankResult, VerifyJob
from lanewise.commands.verify.verify_report import VerifyReport
from lanewise.config import ALONE, DistributedConfig, RunConfig
from lanewise.errors import ConfigError, LaunchError
from lanewise.lanes import lane_ranges
from lanewise.launch.scratch import temporary_folder
from lanewise.processes.device.choice import accelerator_type, count_accelerators
from lanewise.task import Task


def verify(
    config: RunConfig,
    devices: Sequence[int],
    task: Task | None = None,
    *,
    num_steps: int,
    resumes: bool = False,
    show: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Run a few steps on each number of devices, and compare everything with one process.

    Each layout runs in fresh processes of this machine, in `exact` whatever the configuration says.

    Args:
        config: the run; nothing is written to its run_dir.
        devices: numbers of processes; one process is always run, twice.
        task: what the user gave as an object; None: the configuration names it.
        num_steps: steps to take; see `choose_steps`.
        resumes: whether each layout also goes on from a checkpoint of another one.
        show: told what is being run.

    Raises:
        ConfigError: if a class or a device is not what it should be.
        LaunchError: if one process alone fails already.
    """
    if resumes and num_steps < 2:
        raise ConfigError(f"--resume stops half-way and needs at least two steps: got --steps {num_steps}.")
    fsdp = config.distributed.fsdp
    if config.distributed.kind.shards_weights and fsdp.param_dtype != "float32":
        raise ConfigError(
            "verify compares with one process, which has its weights in float32: got "
            f"distributed.fsdp.param_dtype {fsdp.param_dtype}. Verify with param_dtype=float32."
        )
    for count in devices:
        lane_ranges(config.batch.num_lanes, count)  # raises before anything is run
    counts = [1, 1, *(count for count in dict.fromkeys(devices) if count != 1)]
    singular, kind = ("device", "devices") if config.distributed.is_one_process else ("process", "processes")
    names = [f"1 {singular}", "1 again", *(f"{count} {kind}" for count in counts[2:])]
    with temporary_folder() as folder:
        jobs = [
            VerifyJob(
                _in_exact(config, count),
                task,
                folder=folder,
                name=str(number),
                num_steps=num_steps,
                judges_close=config.distributed.equality == "close",
                first_lane=sum(counts[:number]),
                is_reference=number == 0,
                is_repeat=number == 1,
            )
            for number, count in enumerate(counts)
        ]
        prepare_workers(jobs[1].variables, *MODULES)  # it has a server of its own
        layouts: list[LayoutResult] = []
        for name, job in zip(names, jobs, strict=True):
            show(name)
            layouts.append(_run(name, job, layouts[0] if layouts else None))
        if resumes:
            layouts = _resumed(jobs, layouts, show)
    evidence = Evidence(layouts, _left_out(config.distributed))
    findings = diagnose(evidence)
    return VerifyReport(config, layouts, findings, notes(evidence, findings))


def _resumed(
    jobs: Sequence[VerifyJob], layouts: Sequence[LayoutResult], show: Callable[[str], None]
) -> list[LayoutResult]:
    """Let each layout go on from the checkpoint of the one before it, and the first from that of the last."""
    pairs = zip(layouts, jobs, strict=True)
    resumed: dict[str, LayoutResult] = {}
    saved = [(layout, job) for layout, job in pairs if layout.trace.steps and not job.is_repeat]
    for (layout, job), (other, saved_by) in zip(saved, saved[-1:] + saved[:-1], strict=True):
        name = f"{layout.name}, resumed from {other.name}"
        show(name)
        rest = replace(job, name=f"{job.name}-resumed", resume_from=saved_by.name, is_reference=False)
        resumed[layout.name] = _run(name, rest, layouts[0])
    return [replace(layout, resumed=resumed.get(layout.name)) for layout in layouts]


def _run(name: str, job: VerifyJob, reference: LayoutResult | None) -> LayoutResult:
    """Run a layout, and compare it with the reference. The reference itself must not fail."""
    try:
        results: list[RankResult] = start(job, is_fresh=True)
    except LaunchError as error:
        if reference is None:
            raise
        return LayoutResult(name, failure=str(error))
    layout = LayoutResult(name, results, failure=results[0].error)
    layout.compare_with(reference or layout)
    return layout


def _left_out(distributed: DistributedConfig) -> list[str]:
    """Name the settings that `_in_exact` removes, since results depend on the layout through them."""
    compression = [] if distributed.compression is None else [f"compression {distributed.compression}"]
    asked = [*compression, *["sync_batch_norm true"] * distributed.sync_batch_norm]
    return [f"distributed.{setting}" for setting in asked]


def _in_exact(config: RunConfig, num_devices: int) -> RunConfig:
    """Return the configuration for a number of processes, which share accelerators if there are too few."""
    num_accelerators = count_accelerators(config.distributed.device_type)
    devices: int | tuple[str, ...] = num_devices
    if num_accelerators and num_devices > num_accelerators:
        devices = tuple(f"{accelerator_type()}:{rank % num_accelerators}" for rank in range(num_devices))
    distributed = replace(
        config.distributed.on_this_machine(),
        devices=devices,
        equality="exact",
        reducer=config.distributed.reducer_of_several if num_devices > 1 else ALONE,
        fsdp=replace(config.distributed.fsdp, cpu_offload=False),  # which changes where, not what
        compression=None,
        sync_batch_norm=False,
        shard_optimizer=config.distributed.shard_optimizer and num_devices > 1,
        max_restarts=0,
        backend="auto",
    )
    optimizer = config.optimizer
    if config.distributed.kind.shards_weights:  # whose exact knows no fused ones
        arguments = {key: value for key, value in optimizer.init_args.items() if key != "fused"}
        optimizer = replace(optimizer, init_args=arguments)
    return replace(config, distributed=distributed, optimizer=optimizer)
