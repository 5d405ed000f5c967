"""Makes a row for every setting: what it needs, and whether it fits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lanewise.commands.plan.formulas import peak_memory, sent_bytes
from lanewise.commands.plan.measure import largest_batch, measure
from lanewise.commands.plan.memory import Setting
from lanewise.commands.plan.result import FRAGMENTATION, Plan, Row
from lanewise.config import DEFAULT_REDUCER, REDUCERS, ActivationCheckpointingConfig, RunConfig
from lanewise.config.class_path import add_search_path
from lanewise.config.classes import check_classes
from lanewise.engine.run.build import build_task
from lanewise.errors import ConfigError
from lanewise.processes.device.choice import accelerator_type
from lanewise.task import Task

_MOST_DEVICES_OF_A_MACHINE = 16
"""One process is planned to drive at most so many devices: no common machine has more accelerators."""


def plan(
    config: RunConfig,
    devices: Sequence[int],
    task: Task | None = None,
    *,
    memory_bytes: float | None = None,
    untrusted: Sequence[str] = (),
    show: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Say what a run needs under every reducer, on numbers of devices, with and without checkpointing.

    Only one lane is run, on fake tensors if the user's code lets it; the rest are formulas.

    Args:
        config: the run; nothing is written to its run_dir. Its reducer and devices do not matter.
        devices: numbers of devices.
        task: what the user gave as an object; None: the configuration names it.
        memory_bytes: of a device; None: not known.
        untrusted: folders that no code may come from.
        show: called with what is being done.

    Raises:
        ConfigError: if a class in the configuration is not what its section needs, or the loss is of all
            samples of a step.
        DataError: if the dataset is empty.
        TaskError: if the lane cannot be trained.
    """
    add_search_path(config.search_path)
    check_classes(config, has_task=task is not None, untrusted=untrusted)
    device_type = config.distributed.device_type
    if device_type == "auto":
        device_type = accelerator_type() or "cpu"
    show("reading the first batches")
    batch = largest_batch(config, task)
    require_losses_of_lanes(config, task)
    show("measuring a lane")
    variants = [_with_checkpointing(config, None)]
    measurements = [measure(variants[0], batch, device_type, task)]
    if config.memory.activation_checkpointing is not None or measurements[0].repeats_blocks:
        show("measuring a lane with activation checkpointing")
        section = config.memory.activation_checkpointing or ActivationCheckpointingConfig()
        variants.append(_with_checkpointing(config, replace(section, offload=False)))
        measurements.append(measure(variants[1], batch, device_type, task))
    unused = 0 if device_type == "cpu" else FRAGMENTATION / (1 - FRAGMENTATION)
    rows: list[Row] = []
    for variant, measured in zip(variants, measurements, strict=True):
        for setting in _settings(config.batch.num_lanes, devices):
            if setting.kind.shards_weights and measured.why_no_fsdp:
                continue
            memory = peak_memory(measured, setting)
            rows.append(
                Row(
                    setting,
                    is_checkpointed=variant is not variants[0],
                    global_batch_size=setting.num_lanes * config.batch.micro_batch_size,
                    memory=memory,
                    fragmentation_bytes=int(unused * memory.num_bytes),
                    sent_bytes=sent_bytes(measured, setting),
                    limit_bytes=memory_bytes,
                )
            )
    rows.sort(key=lambda row: row.setting.num_devices)
    return Plan(config, device_type, batch, measurements, rows)


def require_losses_of_lanes(config: RunConfig, task: Task | None = None) -> None:
    """Raise ConfigError if the loss of the task is of all samples of a step."""
    if (method := build_task(config, task).loss_method()) != "loss":
        raise ConfigError(
            f"plan counts lanes, and not a loss of all samples of a step: got a task with {method}. "
            "memory/peak_gib of a run with --train.max_steps 2 shows what a step takes."
        )


def _with_checkpointing(config: RunConfig, section: ActivationCheckpointingConfig | None) -> RunConfig:
    """Return the run of which a lane is measured."""
    return replace(in_eager_mode(config), memory=replace(config.memory, activation_checkpointing=section))


def in_eager_mode(config: RunConfig) -> RunConfig:
    """Return the run in one process that has the whole model, in eager mode."""
    here = config.distributed.on_this_machine()
    distributed = replace(here, reducer=DEFAULT_REDUCER, devices=None, sync_batch_norm=False)
    return replace(config, distributed=distributed, compile=None)


def _settings(num_lanes: int, devices: Sequence[int]) -> Iterator[Setting]:
    """Yield every reducer on every number of devices, with more lanes where there are fewer than devices."""
    for count in devices:
        for reducer, kind in REDUCERS.items():
            is_too_many = kind.runs_on == "process" and count > _MOST_DEVICES_OF_A_MACHINE
            if kind.is_for(count) and not is_too_many:
                yield Setting(reducer=reducer, num_devices=count, num_lanes=max(num_lanes, count))
