"""What the formulas take and return: what was measured, a setting, and the memory in use at one moment.

The memory of one lane in the course of its forward and backward without its gradients is recorded
once. Reducers differ in what becomes of a complete gradient and in what they gather for a block: their
formulas go through it and add that at its marks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, repeat
from typing import NamedTuple

from lanewise.commands.plan.model import Weight
from lanewise.commands.plan.update import Cut, Update
from lanewise.config import REDUCERS, Equality, ReducerKind, ReducerName


class LaneMark(Enum):
    """What begins a stretch of a lane."""

    FORWARD = "the lane begins"
    BLOCK_FORWARD = "a block begins"
    BLOCK_END = "a block has returned"
    BACKWARD = "the loss was computed"
    BLOCK_BACKWARD = "the backward comes to a block"
    GRADIENT = "the gradient of a parameter is complete, and taken away"
    END = "the lane has ended"


class Stretch(NamedTuple):
    """The time between two marks."""

    mark: LaneMark
    number: int
    """Which block (from 1 on) or which parameter is marked; 0 for the other marks."""
    live_bytes: int
    """Bytes in use at the mark."""
    peak_bytes: int
    """The most bytes that are in use until the next mark."""


@dataclass(frozen=True)
class LaneMemory:
    """The memory of a lane: its batch, its activations, and what is computed on the way."""

    stretches: Sequence[Stretch]
    batch_bytes: int
    output_bytes: int
    """Bytes of what the forward returned."""
    loss_bytes: int
    """Bytes that the loss keeps for its backward, besides the outputs."""
    saved_bytes: int
    """Bytes that are kept when the loss was computed, with the batch."""

    def peak(self, added_bytes: Iterable[int] = repeat(0)) -> "LanePeak":
        """Return the moment at which most memory is in use.

        Args:
            added_bytes: for each stretch, what is in use besides.
        """
        return max(map(LanePeak, (stretch.peak_bytes for stretch in self.stretches), added_bytes), key=sum)


class LanePeak(NamedTuple):
    """The moment at which most memory is in use."""

    lane_bytes: int
    added_bytes: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A reducer, and the numbers of devices and lanes."""

    reducer: ReducerName
    num_devices: int
    num_lanes: int

    @property
    def kind(self) -> ReducerKind:
        """What the reducer says of itself."""
        return REDUCERS[self.reducer]

    @property
    def num_lanes_each(self) -> int:
        """The most lanes of any device."""
        return -(-self.num_lanes // self.num_devices)

    @property
    def num_shards(self) -> int:
        """Into how many parts parameters, gradients and the optimizer's state are cut."""
        return self.num_devices if self.kind.shards_weights else 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a configuration; nothing in it depends on the number of devices."""

    weights: Sequence[Weight]
    memory: LaneMemory
    buffer_bytes: int
    changed_buffer_bytes: int
    """Bytes of the buffers that a lane's forward changes."""
    num_buffers: int
    update: Callable[[int, Cut], Update]
    """What the optimizer needs, by the number of processes that share the parameters, and how they do."""
    shards_optimizer: bool
    """Whether ddp shares the optimizer's state out among the processes."""
    has_average: bool
    """Whether there is a moving average of the weights."""
    equality: Equality
    shares_memory: bool
    """Whether all devices of one process have one memory, as on the CPU."""
    gathered_itemsize_factor: float = 1.0
    """The itemsize of weights that fsdp gathers, divided by that of the shards that it keeps."""
    offloads: bool = False
    """Whether fsdp keeps its shards in host memory."""
    num_flops: int = 0
    """Floating-point operations of a lane's forward and backward."""
    repeats_blocks: bool = False
    """Whether the model has blocks that could be checkpointed."""
    why_no_fsdp: str = ""
    """Why the model cannot be sharded; empty where it can be."""
    not_counted: Sequence[str] = ()
    """Operators of which only the results are counted, without what else they may keep."""
    why_real: str = ""
    """Why the lane had to run on real tensors; empty where it did not."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient."""
        return sum(weight.num_bytes for weight in self.weights if weight.is_trained)

    @property
    def complete_bytes(self) -> list[int]:
        """Bytes of the gradients that are complete, in each stretch of the lane."""
        return list(
            accumulate(
                self.weights[stretch.number].num_bytes if stretch.mark is LaneMark.GRADIENT else 0
                for stretch in self.memory.stretches
            )
        )


class HeldMoment(NamedTuple):
    """What is in use at one moment of a step, besides what is in use throughout; see `Memory`."""

    gradients: int
    activations: int = 0
    temporary: int = 0
    has_state: bool = True
    """Whether the optimizer has its state, which it makes in the first step."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is in use in a process at one moment, in bytes."""

    parameters: int = 0
    gradients: int = 0
    """The gradients with their partial sums, and the buckets in which they travel."""
    optimizer: int = 0
    average: int = 0
    buffers: int = 0
    """The buffers with the copies that lanes make of them."""
    activations: int = 0
    """The activations of a lane with its batch."""
    temporary: int = 0
    """Gathered weights, what is on its way, and what the optimizer computes with."""
    kept_batch: int = 0
    """Batches that the first steps keep."""

    @property
    def num_bytes(self) -> int:
        """The sum of all."""
        return sum(vars(self).values())

    def at(self, moment: HeldMoment) -> "Memory":
        """Return what is in use at a moment, with this throughout."""
        of_moment = moment._asdict()
        return replace(self, optimizer=self.optimizer * of_moment.pop("has_state"), **of_moment)


def updated_parts(measured: Measured, setting: Setting) -> tuple[int, Cut]:
    """Return among how many processes the update is shared out, and how."""
    if setting.kind.has_options and measured.shards_optimizer:
        return setting.num_devices, "whole"
    return setting.num_shards, "rows"
