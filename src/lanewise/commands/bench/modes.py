"""The modes in which a task can be trained on this machine, and the configuration of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from lanewise.config import ALONE, REDUCERS, DistributedConfig, Equality, ReducerKind, ReducerName, RunConfig
from lanewise.config.load import Override
from lanewise.errors import ConfigError
from lanewise.lanes import lane_ranges
from lanewise.processes.device.choice import accelerator_type

GRADES: tuple[Equality, ...] = ("exact", "close")
Configure: TypeAlias = Callable[[Sequence[Override]], RunConfig]
"""Reads the configuration again with further overrides."""


class Mode(NamedTuple):
    """How the lanes are spread over devices. `single` on several is what the machine can give at most."""

    reducer: ReducerName
    num_devices: int
    equality: Equality

    @property
    def kind(self) -> ReducerKind:
        """What the reducer says of itself."""
        return REDUCERS[self.reducer]

    @property
    def is_ceiling(self) -> bool:
        """Whether each device trains its share of every step by itself, and never talks to the others."""
        return self.kind.runs_on == "device" and self.num_devices > 1

    @property
    def name(self) -> str:
        """What the tables call the reducer."""
        return "(never talking)" if self.is_ceiling else self.reducer

    def __str__(self) -> str:
        devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
        return f"{self.name} on {devices}, {self.equality}"


def modes_here(reducers: Sequence[ReducerName], devices: Sequence[int], config: RunConfig) -> list[Mode]:
    """Return each reducer in both grades that one device or several of this machine can have.

    The ceilings come last, in the grade of the configuration.

    Raises:
        ConfigError: there is none.
    """
    modes = [
        Mode(reducer, num_devices, equality)
        for num_devices in dict.fromkeys(devices)
        for reducer in reducers
        for equality in GRADES
        if REDUCERS[reducer].is_for(num_devices)
    ]
    if not modes:
        raise ConfigError(
            "single is for one device, and the other reducers are for several: got --reducers "
            f"{','.join(reducers)} and --devices {','.join(map(str, devices))}. Add what belongs together."
        )
    several = dict.fromkeys(mode.num_devices for mode in modes if mode.num_devices > 1)
    return modes + [Mode(ALONE, count, config.distributed.equality) for count in several]


def overrides_of(mode: Mode, distributed: DistributedConfig) -> Iterator[Override]:
    """Yield what makes a configuration one of this mode, without the settings that the mode cannot have."""
    if distributed.launcher == "local":
        yield Override("distributed.devices", str(mode.num_devices))
    yield Override("distributed.reducer", mode.reducer)
    yield Override("distributed.equality", mode.equality)
    for key in left_out(mode, distributed):
        yield Override(f"distributed.{key}", "null" if key == "compression" else "false")


def left_out(mode: Mode, distributed: DistributedConfig) -> list[str]:
    """Return the keys of the section `distributed` that are set and that the mode cannot have."""
    has_options = mode.kind.has_options
    cannot_have = {
        "shard_optimizer": not has_options,
        "compression": not has_options or mode.equality == "exact",
        "sync_batch_norm": not has_options or mode.equality == "exact",
    }
    return [key for key, cannot in cannot_have.items() if cannot and getattr(distributed, key)]


def shares_of(config: RunConfig, num_devices: int) -> Iterator[RunConfig]:
    """Yield for each device a run of its own, of the lanes that it would carry of a step of the whole run.

    Args:
        config: of one device.
        num_devices: how many share the lanes.
    """
    device_type = config.distributed.device_type
    if device_type == "auto":
        device_type = accelerator_type() or "cpu"
    for number, lanes in enumerate(lane_ranges(config.batch.num_lanes, num_devices)):
        batch = replace(config.batch, global_batch_size=len(lanes) * config.batch.micro_batch_size)
        devices = 1 if device_type == "cpu" else (f"{device_type}:{number}",)
        yield replace(config, batch=batch, distributed=replace(config.distributed, devices=devices))
