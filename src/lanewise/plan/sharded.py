"""What a lane holds under fsdp, where weights are gathered for a block and gradients are sent after it.

The order of events is that of torch's FSDP2 (`torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`):
what is gathered comes in a buffer and is copied out of it; in a forward that buffer is kept until the next
block's is filled, and in a backward it is filled while the block before computes. What a block sends is kept
until the next block sends.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from lanewise.plan.memory import Layout, Measured, Memory, Moments, held, moments_of_update
from lanewise.plan.model import ROOT, Weight
from lanewise.plan.pending import pending_sums
from lanewise.plan.tape import Mark, Stretch


def moments_of_fsdp(measured: Measured, layout: Layout) -> Moments:
    """Yield the moments of one process of several that share the model."""
    now = held(measured, layout)
    groups = _Groups.of(measured, layout.num_devices)
    is_exact = measured.equality == "exact"
    pending = 0
    if is_exact:  # rows of every rank are kept, so as much as the whole gradient
        sums = pending_sums(layout.num_lanes, layout.num_devices)
        pending = max(sums.before_last, sums.at_last) * sum(groups.sent.values())
    shards = sum(groups.shards.values())
    if measured.offloads:
        now, shards = replace(now, parameters=0, optimizer=0, average=0), 0
    has_shards = layout.num_lanes_each > 1
    lane = _Lane(groups, measured.weights, is_exact=is_exact, keeps_shards=has_shards or measured.offloads)
    for stretch in measured.tape.stretches:
        for memory in lane.play(stretch):
            yield replace(
                now,
                gradients=memory.gradients + pending + (shards if has_shards else 0),
                activations=memory.activations,
                temporary=memory.temporary,
            )
    if not measured.offloads:
        yield from moments_of_update(measured, layout, shards)


@dataclass(frozen=True)
class _Groups:
    """Bytes of what is gathered together, by group."""

    gathered: Counter[int]
    sent: Counter[int]
    """What a lane sends of its gradients, padded."""
    shards: Counter[int]
    """The part of each process of that."""
    num_gradients: Counter[int]

    @classmethod
    def of(cls, measured: Measured, num_shards: int) -> "_Groups":
        groups = cls(Counter(), Counter(), Counter(), Counter())
        gradients = {one.number for one in measured.tape.stretches if one.mark is Mark.GRADIENT}
        for index, weight in enumerate(measured.weights):
            part = weight.shard_bytes(num_shards)
            groups.gathered[weight.group] += int(part * num_shards * measured.gathered_itemsize_factor)
            if weight.is_trained:
                groups.sent[weight.group] += part * num_shards
                groups.shards[weight.group] += part
            if index in gradients:
                groups.num_gradients[weight.group] += 1
        return groups


@dataclass
class _Lane:
    """The state of one lane, as its tape is played."""

    groups: _Groups
    weights: Sequence[Weight]
    is_exact: bool
    keeps_shards: bool
    """Whether earlier lanes left the shards of the gradient, to which those of this one are added."""
    whole: dict[int, int] = field(default_factory=dict)
    """What is gathered."""
    buffer: tuple[int, int] | None = None
    """A group, and what is gathered of it but not yet copied out, or was so last in the forward."""
    order: list[int] = field(default_factory=list)
    """In which groups returned from the forward."""
    unsent: Counter[int] = field(default_factory=Counter)
    """Gradients that wait until all of their group are complete."""
    num_unsent: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    """The last group's, as it is kept until the next one's."""
    received: int = 0
    """In `exact`, of all ranks, until the lane ends."""
    shards: int = 0

    def play(self, stretch: Stretch) -> Iterator[Memory]:
        """Do what a mark asks for, and yield what is alive then and until the next mark."""
        mark, number, live = stretch.mark, stretch.number, stretch.live_bytes
        if mark is Mark.FORWARD:
            yield from self._gather(ROOT, live, in_forward=True)
        elif mark is Mark.BLOCK_FORWARD:
            yield from self._gather(number, live, in_forward=True)
        elif mark is Mark.BLOCK_END:
            self.whole.pop(number, None)
            self.order.append(number)
        elif mark is Mark.BACKWARD:
            self.buffer = None
            self._prefetch(len(self.order))
        elif mark is Mark.BLOCK_BACKWARD:
            yield from self._gather(number, live, in_forward=False)
        elif mark is Mark.GRADIENT:
            weight = self.weights[number]
            self.unsent[weight.group] += weight.num_bytes
            self.num_unsent[weight.group] += 1
            is_complete = self.num_unsent[weight.group] == self.groups.num_gradients[weight.group]
            if is_complete and weight.group != ROOT:
                yield from self._send(weight.group, live)
        elif mark is Mark.END:
            yield from self._send(ROOT, live)
        yield self._moment(stretch.peak_bytes)

    def _gather(self, group: int, live: int, *, in_forward: bool) -> Iterator[Memory]:
        size = self.groups.gathered[group]
        if group in self.whole or not size:
            return
        if in_forward:
            yield self._moment(live, size)  # beside the buffer of the block before
        self.buffer = (group, size)
        self.whole[group] = size
        yield self._moment(live)
        if not in_forward:
            self.buffer = None
            self._prefetch(self.order.index(group) if group in self.order else 0)

    def _prefetch(self, place: int) -> None:
        """Begin to gather what the backward needs next."""
        if place > 0:
            group = self.order[place - 1]
            self.buffer = (group, self.groups.gathered[group])

    def _send(self, group: int, live: int) -> Iterator[Memory]:
        self.whole.pop(group, None)
        self.sent = self.groups.sent[group]
        yield self._moment(live)
        self.unsent[group] = 0
        self.received += self.sent if self.is_exact else 0
        part = self.groups.shards[group]
        yield self._moment(live, part)
        self.shards += 0 if self.keeps_shards else part

    def _moment(self, live: int, more: int = 0) -> Memory:
        in_buffer = self.buffer[1] if self.buffer is not None else 0
        return Memory(
            gradients=self.unsent.total() + self.received + self.shards,
            activations=live,
            temporary=sum(self.whole.values()) + in_buffer + self.sent + more,
        )
