"""What the formulas of memory take and give: what was measured, a layout, and what is alive at a moment.

Each formula lists the moments of a step at which most may be alive; the largest of them counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

from lanewise.config import Equality, ReducerName
from lanewise.plan.model import Weight
from lanewise.plan.tape import Tape
from lanewise.plan.update import Cut, Update


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the lanes of a run are carried."""

    reducer: ReducerName
    num_devices: int
    num_lanes: int

    @property
    def num_lanes_each(self) -> int:
        """The most lanes of any device."""
        return -(-self.num_lanes // self.num_devices)

    @property
    def num_shards(self) -> int:
        """Into how many parts parameters, gradients and the optimizer's state are cut."""
        return self.num_devices if self.reducer == "fsdp" else 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the formulas are fed with; nothing in it depends on the number of devices."""

    weights: Sequence[Weight]
    tape: Tape
    buffer_bytes: int
    changed_buffer_bytes: int
    """Of the buffers that a lane's forward changes."""
    num_buffers: int
    update: Callable[[int, Cut], Update]
    """By the number of processes among which parameters are shared out, and how."""
    shards_optimizer: bool
    """Whether ddp shares the optimizer's state out among the processes."""
    has_average: bool
    """Whether there is a moving average of the weights."""
    equality: Equality
    shares_memory: bool
    """Whether all devices of one process have one memory, as on the CPU."""
    gathered_itemsize_factor: float = 1.0
    """By how much weights that fsdp gathers are smaller than those that it keeps."""
    offloads: bool = False
    """Whether fsdp keeps in host memory what is cut into parts."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient."""
        return sum(weight.num_bytes for weight in self.weights if weight.is_trained)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is alive in a process at one moment, in bytes."""

    parameters: int = 0
    gradients: int = 0
    """Also partial sums of them, and buckets in which they travel."""
    optimizer: int = 0
    average: int = 0
    buffers: int = 0
    """Also the copies that lanes make of them."""
    activations: int = 0
    """Also the lane's batch."""
    temporary: int = 0
    """Gathered weights, what is on its way, what the optimizer computes with."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


Moments: TypeAlias = Iterator[Memory]


def held(measured: Measured, layout: Layout) -> Memory:
    """Return what is alive throughout a step, but the first one."""
    num_parts, num_replicas = layout.num_shards, _num_replicas(measured, layout)
    parameters = sum(weight.shard_bytes(num_parts) for weight in measured.weights)
    is_alone = layout.num_lanes_each == layout.num_devices == 1  # nothing is merged
    num_kept = 0 if is_alone else 1 + layout.num_lanes_each
    return Memory(
        parameters=parameters * num_replicas,
        optimizer=update_of(measured, layout).state_bytes,
        average=parameters + measured.buffer_bytes if measured.has_average else 0,
        buffers=measured.buffer_bytes * (num_replicas + 1) + measured.changed_buffer_bytes * num_kept,
    )


def updated_parts(measured: Measured, layout: Layout) -> tuple[int, Cut]:
    """Return among how many processes the update is shared out, and how."""
    if layout.reducer == "ddp" and measured.shards_optimizer:
        return layout.num_devices, "whole"
    return layout.num_shards, "rows"


def update_of(measured: Measured, layout: Layout) -> Update:
    """Return what the optimizer needs on each process."""
    return measured.update(*updated_parts(measured, layout))


def moments_of_update(measured: Measured, layout: Layout, gradient_bytes: int) -> Moments:
    """Yield the moment at which the optimizer needs most."""
    yield replace(
        held(measured, layout),
        gradients=gradient_bytes,
        temporary=update_of(measured, layout).temporary_bytes,
    )


def _num_replicas(measured: Measured, layout: Layout) -> int:
    is_one_process = layout.reducer in ("data_parallel", "balanced_data_parallel")
    return layout.num_devices if is_one_process and measured.shares_memory else 1
