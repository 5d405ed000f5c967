"""The memory of a process under fsdp, where weights are gathered for a block and gradients are sent after it.

The order of events is that of torch's FSDP2 (`torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`):
what is gathered comes in a buffer and is copied out of it. In a forward that buffer is kept until the next
block's is filled; in a backward it is filled while the block before computes. What a block sends is kept
until the next block sends.
"""

from collections import Counter
from collections.abc import Iterator
from typing import final

from lanewise.commands.plan.memory import HeldMoment, Measured, Setting
from lanewise.commands.plan.model import ROOT
from lanewise.commands.plan.pending import pending_sums
from lanewise.commands.plan.tape import Stretch, TapeMark


def moments_of_fsdp(measured: Measured, setting: Setting) -> Iterator[HeldMoment]:
    """Yield the moments of one process of several that share the model."""
    lane = _Lane(measured, setting)
    for stretch in measured.tape.stretches:
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
            for stretch in measured.tape.stretches
            if stretch.mark is TapeMark.GRADIENT
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
            case TapeMark.FORWARD | TapeMark.BLOCK_FORWARD:
                yield from self._gather(number, live, in_forward=True)
            case TapeMark.BLOCK_END:
                self.whole.discard(number)
                self.order.append(number)
            case TapeMark.BACKWARD:
                self._prefetch(len(self.order))
            case TapeMark.BLOCK_BACKWARD:
                yield from self._gather(number, live, in_forward=False)
            case TapeMark.GRADIENT:
                weight = self.weights[number]
                self.unsent[weight.group] += weight.num_bytes
                self.num_missing[weight.group] -= 1
                if not self.num_missing[weight.group] and weight.group != ROOT:
                    yield from self._send(weight.group, live)
            case TapeMark.END:
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
