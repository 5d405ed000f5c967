"""The memory that a process needs under each reducer, by formula.

Each formula lists the moments of a step at which most memory may be in use; the largest of them counts.
"""

from collections.abc import Callable, Iterator

from lanewise.commands.plan.memory import HeldMoment, Measured, Memory, Setting, updated_parts
from lanewise.commands.plan.pending import pending_counts, pending_sums
from lanewise.commands.plan.sharded import moments_of_fsdp
from lanewise.config import ReducerKind


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
    tape, size = measured.tape, measured.gradient_bytes
    first = tape.peak(measured.complete_bytes)
    pending = 0
    if measured.equality == "exact":
        sums = pending_sums(setting.num_lanes, 1)
        pending = max(sums.before_last, sums.at_last) * size
    elif setting.num_lanes > 1:
        yield HeldMoment(size, tape.peak().lane_bytes)
    yield HeldMoment(pending + first.added_bytes, first.lane_bytes)


def _moments_of_ddp(measured: Measured, setting: Setting) -> Iterator[HeldMoment]:
    """Yield the moments of one process of several that have the whole model.

    DDP keeps its buckets, of the size of the gradient, throughout. Beside them are the gradients of the lanes
    before the last one, which move into the buckets during the last backward.
    """
    tape, size, complete = measured.tape, measured.gradient_bytes, measured.complete_bytes
    first, num_lanes = tape.peak(complete), setting.num_lanes_each
    last = tape.peak(size - num_bytes for num_bytes in complete)
    # In the first step DDP is entered after the backward, and the optimizer has no state yet.
    yield HeldMoment(size + first.added_bytes, first.lane_bytes, has_state=False)
    if measured.equality == "exact":
        sums = pending_sums(setting.num_lanes, setting.num_devices)
        if num_lanes > 1:
            yield HeldMoment((1 + sums.before_last) * size + first.added_bytes, first.lane_bytes)
        last = last if sums.at_last else tape.peak()
        yield HeldMoment(max(1, sums.at_last) * size + last.added_bytes, last.lane_bytes)
        yield HeldMoment((1 + sums.at_last) * size + first.added_bytes, first.lane_bytes, has_state=False)
    elif num_lanes == 1:
        yield HeldMoment(size, tape.peak().lane_bytes)
    else:
        for peak in (first, last):
            yield HeldMoment(size + peak.added_bytes, peak.lane_bytes)
        yield HeldMoment(2 * size, tape.peak().lane_bytes, has_state=num_lanes > 2)


def _moments_of_replicas(measured: Measured, setting: Setting) -> Iterator[HeldMoment]:
    """Yield the moments of one process that drives all devices.

    Where each device has a memory of its own, they are those of the first device.
    """
    tape, size = measured.tape, measured.gradient_bytes
    num_others = min(setting.num_devices, setting.num_lanes) - 1
    first, again = tape.peak(measured.complete_bytes), tape.peak()
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
        waiting, accumulated = num_others * tape.saved_bytes, num_others * size
        # The backward goes through the graph of the last lane first.
        for earlier, saved in ((0, waiting), (accumulated, 0)):
            yield HeldMoment(pending + earlier + first.added_bytes, saved + first.lane_bytes)
        if adds_lanes:
            yield HeldMoment(accumulated + size, waiting + again.lane_bytes)
        yield HeldMoment(accumulated + size + pending)
    else:
        num_gathered = num_others if setting.kind.gathers_outputs else 0
        gathered = num_gathered * (tape.output_bytes + tape.loss_bytes)
        peak, gradients = (again, size) if adds_lanes else (first, pending + first.added_bytes)
        yield HeldMoment(gradients, gathered + peak.lane_bytes)
