"""A row of a plan: what a setting needs, how long its steps take, and whether it fits."""

from dataclasses import dataclass

from lanewise.commands.plan.memory import Memory, Setting
from lanewise.commands.plan.traffic import Traffic

FRAGMENTATION = 0.15
"""Part of what CUDA's caching allocator reserves that nothing can use: the mean that GMLake found, and took
away, in the fine-tuning of eight language models (https://arxiv.org/abs/2401.08156); up to 0.33 there."""
_BACKWARD = 2 / 3
"""Part of a lane's time that its backward takes: two products for each one of the forward."""


@dataclass(frozen=True)
class Machine:
    """What is given of the devices; None: not known."""

    memory_bytes: float | None = None
    link_bytes_per_second: float | None = None


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, in seconds."""

    compute: float
    exposed: float
    """Communication that no computation hides."""

    @property
    def total(self) -> float:
        """The step, without what the loader takes."""
        return self.compute + self.exposed


@dataclass(frozen=True)
class Row:
    """A setting, with or without activation checkpointing."""

    setting: Setting
    is_checkpointed: bool
    global_batch_size: int
    """The configured one, or the smallest that gives every device a lane."""
    memory: Memory
    fragmentation_bytes: int
    traffic: Traffic
    machine: Machine
    lane_seconds: float | None
    update_seconds: float = 0.0
    """What the optimizer takes, of what the process updates."""

    @property
    def num_bytes(self) -> int:
        """What the process needs, with what fragmentation makes useless."""
        return self.memory.num_bytes + self.fragmentation_bytes

    @property
    def fits(self) -> bool:
        """Whether the memory is enough, as far as that is known."""
        return self.machine.memory_bytes is None or self.num_bytes <= self.machine.memory_bytes

    @property
    def sent_bytes(self) -> float:
        """What the process sends in a step."""
        return self.traffic.num_bytes(self.setting.num_lanes_each)

    @property
    def link_seconds(self) -> float | None:
        """How long the link is busy in a step; None where its speed is not known."""
        speed = self.machine.link_bytes_per_second
        return 0.0 if not self.sent_bytes else None if speed is None else self.sent_bytes / speed

    @property
    def step(self) -> StepTime | None:
        """How long a step takes; None where the lane's time, or the link's speed, is not known."""
        if self.lane_seconds is None or self.link_seconds is None:
            return None
        num_lanes, speed = self.setting.num_lanes_each, self.machine.link_bytes_per_second or 1.0
        exposed = self.traffic.between / speed
        exposed += num_lanes * max(0.0, self.traffic.of_each_lane / speed - self.lane_seconds)
        exposed += max(0.0, self.traffic.of_last_backward / speed - _BACKWARD * self.lane_seconds)
        return StepTime(num_lanes * self.lane_seconds + self.update_seconds, exposed)

    @property
    def samples_per_second(self) -> float | None:
        """The speed by which settings are compared, since their global batches may differ."""
        return None if self.step is None else self.global_batch_size / self.step.total
