"""The memory that a process needs under each reducer, and what it sends in a step, by formula.

Each formula of memory lists the moments of a step at which most may be in use; the largest of them counts.

The order of events under fsdp is that of torch's FSDP2
(`torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`): what is gathered comes in a buffer and is copied
out of it. In a forward that buffer is kept until the next block's is filled; in a backward it is filled while
the block before computes. What a block sends is kept until the next block sends.

A ring sends each byte of a reduction (n - 1) / n times, and as often in the gather that follows
(https://arxiv.org/abs/1802.05799). A process receives as much as it sends, and a link does both at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, final

from lanewise.commands.plan.memory import (
    HeldMoment,
    LaneMark,
    Measured,
    Memory,
    Setting,
    Stretch,
    updated_parts,
)
from lanewise.commands.plan.model import ROOT
from lanewise.config import ReducerKind
from lanewise.lanes import TreeSum, lane_ranges


class PendingSums(NamedTuple):
    """The most partial sums of any process, besides the gradient of the lane that runs."""

    before_last: int
    """The most while a lane runs that is not the process's last one."""
    at_last: int
    """The most while the last lane runs."""
    left: int
    """The most after the last lane: the process sends them."""


@lru_cache(maxsize=64)
def pending_sums(num_lanes: int, num_processes: int) -> PendingSums:
    """Count the partial sums of the process that has most of them."""
    before_last = at_last = left = 0
    for lanes in lane_ranges(num_lanes, num_processes):
        *before, last, after = pending_counts(lanes, num_lanes)
        before_last = max([before_last, *before])
        at_last, left = max(at_last, last), max(left, after)
    return PendingSums(before_last, at_last, left)


def pending_counts(lanes: range, num_lanes: int) -> list[int]:
    """Count the partial sums of a process before each of its lanes, and after the last one."""
    tree_sum: TreeSum[None] = TreeSum(num_lanes, range(num_lanes), lambda _left, _right: None)
    counts = [0]
    for lane in lanes:
        tree_sum.push((lane, lane + 1), None)
        counts.append(len(tree_sum.pending))
    return counts


def moments_of_fsdp(measured: Measured, setting: Setting) -> Iterator[HeldMoment]:
    """Yield the moments of one process of several that share the model."""
    lane = _Lane(measured, setting)
    for stretch in measured.memory.stretches:
        yield from lane.play(stretch)


@final
class _Lane:
    """The state of a process in the course of one lane. Groups are those of `Weight.group`."""

    def __init__(self, measured: Measured, setting: Setting) -> None:
        weights, num_shards = measured.weights, setting.num_devices
        self.weights = weights
        self.is_exact = measured.equality == "exact"
        self.num_shards = num_shards
        self.part = Counter[int]()
        """Bytes of each process's part of the gradient, by group."""
        self.gathered = Counter[int]()
        """Bytes of the gathered weights, by group."""
        for weight in weights:
            part = weight.shard_bytes(num_shards)
            self.gathered[weight.group] += int(part * num_shards * measured.gathered_itemsize_factor)
            self.part[weight.group] += part * weight.is_trained
        self.num_missing = Counter(
            weights[stretch.number].group
            for stretch in measured.memory.stretches
            if stretch.mark is LaneMark.GRADIENT
        )
        """Gradients that are not complete, by group."""
        has_earlier_lanes, size = setting.num_lanes_each > 1, self.part.total()
        self.keeps_shards = has_earlier_lanes or measured.offloads
        """Whether a shard of the gradient is added to one that there is, or moves to the host."""
        self.shards = size if has_earlier_lanes and not measured.offloads else 0
        """Bytes of the shards of the gradient."""
        self.pending = 0
        """Bytes of the partial sums; rows of every rank are kept, so as much as the whole gradient."""
        if self.is_exact:
            sums = pending_sums(setting.num_lanes, num_shards)
            self.pending = max(sums.before_last, sums.at_last) * size * num_shards
        self.whole = set[int]()
        """Groups that are gathered."""
        self.buffer_bytes = 0
        """Bytes of what is gathered and not yet copied out, or was copied out last in the forward."""
        self.order: list[int] = []
        """The groups in the order in which they returned from the forward."""
        self.unsent = Counter[int]()
        """Bytes of gradients that wait until all of their group are complete."""
        self.sent_bytes = 0
        """Bytes of the last group that was sent, kept until the next one is."""

    def play(self, stretch: Stretch) -> Iterator[HeldMoment]:
        """Do what a mark asks for, and yield what is in use then and until the next mark."""
        number, live = stretch.number, stretch.live_bytes
        match stretch.mark:
            case LaneMark.FORWARD | LaneMark.BLOCK_FORWARD:
                yield from self._gather(number, live, in_forward=True)
            case LaneMark.BLOCK_END:
                self.whole.discard(number)
                self.order.append(number)
            case LaneMark.BACKWARD:
                self._prefetch(len(self.order))
            case LaneMark.BLOCK_BACKWARD:
                yield from self._gather(number, live, in_forward=False)
            case LaneMark.GRADIENT:
                weight = self.weights[number]
                self.unsent[weight.group] += weight.num_bytes
                self.num_missing[weight.group] -= 1
                if not self.num_missing[weight.group] and weight.group != ROOT:
                    yield from self._send(weight.group, live)
            case LaneMark.END:
                yield from self._send(ROOT, live)
        yield self._moment(stretch.peak_bytes)

    def _gather(self, group: int, live: int, *, in_forward: bool) -> Iterator[HeldMoment]:
        size = self.gathered[group]
        if group in self.whole or not size:
            return
        if in_forward:
            yield self._moment(live, size)  # beside the buffer of the block before
        self.buffer_bytes = size
        self.whole.add(group)
        yield self._moment(live)
        if not in_forward:
            self._prefetch(self.order.index(group) if group in self.order else 0)

    def _prefetch(self, place: int) -> None:
        """Begin to gather the group that the backward needs next: the one before a place in the order."""
        self.buffer_bytes = self.gathered[self.order[place - 1]] if place else 0

    def _send(self, group: int, live: int) -> Iterator[HeldMoment]:
        part = self.part[group]
        self.whole.discard(group)
        self.sent_bytes = part * self.num_shards
        yield self._moment(live)
        self.unsent[group] = 0
        self.pending += self.sent_bytes if self.is_exact else 0  # of all ranks, until the lane ends
        yield self._moment(live, part)
        self.shards += 0 if self.keeps_shards else part

    def _moment(self, live: int, more: int = 0) -> HeldMoment:
        gathered = sum(self.gathered[group] for group in self.whole) + self.buffer_bytes
        gradients = self.unsent.total() + self.pending + self.shards
        return HeldMoment(gradients, live, gathered + self.sent_bytes + more)


def peak_memory(measured: Measured, setting: Setting) -> Memory:
    """Return what is in use at the largest moment of a step, in the process that needs most."""
    num_parts, is_on_host = setting.num_shards, setting.kind.shards_weights and measured.offloads
    update = measured.update(*updated_parts(measured, setting))
    parameters = sum(weight.shard_bytes(num_parts) for weight in measured.weights)
    is_one_memory = setting.kind.runs_on == "process" and measured.shares_memory
    num_replicas = setting.num_devices if is_one_memory else 1
    is_alone = setting.num_lanes_each == setting.num_devices == 1  # nothing is merged
    num_kept = 0 if is_alone else 1 + setting.num_lanes_each
    throughout = Memory(
        parameters=0 if is_on_host else parameters * num_replicas,
        optimizer=0 if is_on_host else update.state_bytes,
        average=parameters + measured.buffer_bytes if measured.has_average and not is_on_host else 0,
        buffers=measured.buffer_bytes * (num_replicas + 1) + measured.changed_buffer_bytes * num_kept,
        # The first steps keep a copy of a batch, and run its lane again on another, beside the next batch.
        kept_batch=0 if setting.kind.shards_weights else 3 * measured.memory.batch_bytes,
    )
    moments = list(_moments_of(setting.kind)(measured, setting))
    if not is_on_host:
        gradients = sum(weight.shard_bytes(num_parts) for weight in measured.weights if weight.is_trained)
        moments.append(HeldMoment(gradients, temporary=update.temporary_bytes))
    return max(map(throughout.at, moments), key=lambda memory: memory.num_bytes)


def _moments_of(kind: ReducerKind) -> Callable[[Measured, Setting], Iterator[HeldMoment]]:
    """Return the formula of a reducer, by what it says of itself."""
    if kind.shards_weights:
        return moments_of_fsdp
    formulas = {"device": _moments_of_single, "process": _moments_of_replicas, "processes": _moments_of_ddp}
    return formulas[kind.runs_on]


def _moments_of_single(measured: Measured, setting: Setting) -> Iterator[HeldMoment]:
    """Yield the moments of one process that carries all lanes."""
    memory, size = measured.memory, measured.gradient_bytes
    first = memory.peak(measured.complete_bytes)
    pending = 0
    if measured.equality == "exact":
        sums = pending_sums(setting.num_lanes, 1)
        pending = max(sums.before_last, sums.at_last) * size
    elif setting.num_lanes > 1:
        yield HeldMoment(size, memory.peak().lane_bytes)
    yield HeldMoment(pending + first.added_bytes, first.lane_bytes)


def _moments_of_ddp(measured: Measured, setting: Setting) -> Iterator[HeldMoment]:
    """Yield the moments of one process of several that have the whole model.

    DDP keeps its buckets, of the size of the gradient, throughout. Beside them are the gradients of the lanes
    before the last one, which move into the buckets during the last backward.
    """
    memory, size, complete = measured.memory, measured.gradient_bytes, measured.complete_bytes
    first, num_lanes = memory.peak(complete), setting.num_lanes_each
    last = memory.peak(size - num_bytes for num_bytes in complete)
    # In the first step DDP is entered after the backward, and the optimizer has no state yet.
    yield HeldMoment(size + first.added_bytes, first.lane_bytes, has_state=False)
    if measured.equality == "exact":
        sums = pending_sums(setting.num_lanes, setting.num_devices)
        if num_lanes > 1:
            yield HeldMoment((1 + sums.before_last) * size + first.added_bytes, first.lane_bytes)
        last = last if sums.at_last else memory.peak()
        yield HeldMoment(max(1, sums.at_last) * size + last.added_bytes, last.lane_bytes)
        yield HeldMoment((1 + sums.at_last) * size + first.added_bytes, first.lane_bytes, has_state=False)
    elif num_lanes == 1:
        yield HeldMoment(size, memory.peak().lane_bytes)
    else:
        for peak in (first, last):
            yield HeldMoment(size + peak.added_bytes, peak.lane_bytes)
        yield HeldMoment(2 * size, memory.peak().lane_bytes, has_state=num_lanes > 2)


def _moments_of_replicas(measured: Measured, setting: Setting) -> Iterator[HeldMoment]:
    """Yield the moments of one process that drives all devices.

    Where each device has a memory of its own, they are those of the first device.
    """
    memory, size = measured.memory, measured.gradient_bytes
    num_others = min(setting.num_devices, setting.num_lanes) - 1
    first, again = memory.peak(measured.complete_bytes), memory.peak()
    adds_lanes = measured.equality == "close" and setting.num_lanes_each > 1
    pending = 0
    if measured.equality == "exact":
        *_, last_start = range(0, setting.num_lanes, setting.num_devices)
        counts = pending_counts(range(last_start), setting.num_lanes)
        pending = max(counts[:: setting.num_devices]) * size
        # The lanes that run at once come one after the other, and are added as far as the tree allows.
        num_lanes = num_others + 1
        num_held = num_lanes if measured.shares_memory else num_lanes.bit_length()
        yield HeldMoment(pending + num_held * size)
    if measured.shares_memory:
        waiting, accumulated = num_others * memory.saved_bytes, num_others * size
        # The backward goes through the graph of the last lane first.
        for earlier, saved in ((0, waiting), (accumulated, 0)):
            yield HeldMoment(pending + earlier + first.added_bytes, saved + first.lane_bytes)
        if adds_lanes:
            yield HeldMoment(accumulated + size, waiting + again.lane_bytes)
        yield HeldMoment(accumulated + size + pending)
    else:
        num_gathered = num_others if setting.kind.gathers_outputs else 0
        gathered = num_gathered * (memory.output_bytes + memory.loss_bytes)
        peak, gradients = (again, size) if adds_lanes else (first, pending + first.added_bytes)
        yield HeldMoment(gradients, gathered + peak.lane_bytes)


_TOTALS_BYTES = 16
"""Bytes that a lane sends to all processes: its loss sum and its weight, as float64."""


def sent_bytes(measured: Measured, setting: Setting) -> float:
    """Return how many bytes the process that sends most sends in a step.

    Of one process that drives all devices, it is what the first device sends.
    """
    num_devices, num_lanes = setting.num_devices, setting.num_lanes
    if num_devices == 1:
        return 0.0
    is_exact, size = measured.equality == "exact", measured.gradient_bytes
    if setting.kind.runs_on == "process":
        memory, num_others = measured.memory, num_lanes - setting.num_lanes_each
        num_gradients = num_others if is_exact else num_devices - 1
        # The outputs travel to the first device, and their gradients back.
        batches = memory.batch_bytes + 2 * memory.output_bytes * setting.kind.gathers_outputs
        weights = (num_devices - 1) * sum(weight.num_bytes for weight in measured.weights)
        return weights + num_gradients * size + num_others * batches
    part = (num_devices - 1) / num_devices
    num_sums = pending_sums(num_lanes, num_devices).left
    between: float = (num_devices - 1) * (
        _TOTALS_BYTES * (setting.num_lanes_each + 1)
        + 8 * measured.num_buffers
        + 2 * measured.changed_buffer_bytes * num_sums  # as float64
    )
    if not setting.kind.shards_weights:
        if measured.shards_optimizer:
            between += part * measured.gradient_bytes  # updated parameters, each from one process to all
        return part * size * (1 + (num_sums if is_exact else 1)) + between
    of_lane = 0.0
    for weight in measured.weights:
        padded = weight.shard_bytes(num_devices) * num_devices
        num_gathers = 1 if weight.group == ROOT else 2
        of_lane += padded * (num_gathers * measured.gathered_itemsize_factor + weight.is_trained)
    return part * of_lane * setting.num_lanes_each + between
