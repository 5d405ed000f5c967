"""What processes hold that have the whole model: one alone, or those of ddp."""

from dataclasses import replace

from lanewise.plan.gradients import arriving, leaving
from lanewise.plan.memory import Layout, Measured, Moments, held, moments_of_update
from lanewise.plan.pending import pending_sums


def moments_of_single(measured: Measured, layout: Layout) -> Moments:
    """Yield the moments of one process that carries all lanes."""
    tape, size, now = measured.tape, measured.gradient_bytes, held(measured, layout)
    first = tape.peak(arriving(measured.weights))
    pending = 0
    if measured.equality == "exact":
        sums = pending_sums(layout.num_lanes, 1)
        pending = max(sums.before_last, sums.at_last) * size
    elif layout.num_lanes > 1:
        yield replace(now, gradients=size, activations=tape.peak().lane_bytes)
    yield replace(now, gradients=pending + first.added_bytes, activations=first.lane_bytes)
    yield from moments_of_update(measured, layout, size)


def moments_of_ddp(measured: Measured, layout: Layout) -> Moments:
    """Yield the moments of one process of several that have the whole model.

    DDP keeps its buckets, of the size of the gradient, throughout. The gradients of the lanes before the last
    one are beside them, in its own backward they move there.
    """
    tape, size, now = measured.tape, measured.gradient_bytes, held(measured, layout)
    first, num_lanes = tape.peak(arriving(measured.weights)), layout.num_lanes_each
    # In the first step DDP is entered after the backward, and the optimizer has no state yet.
    yield replace(now, optimizer=0, gradients=size + first.added_bytes, activations=first.lane_bytes)
    if measured.equality == "exact":
        sums = pending_sums(layout.num_lanes, layout.num_devices)
        if num_lanes > 1:
            gradients = (1 + sums.before_last) * size + first.added_bytes
            yield replace(now, gradients=gradients, activations=first.lane_bytes)
        last = tape.peak(leaving(measured.weights)) if sums.at_last else tape.peak()
        gradients = size + max(0, sums.at_last - 1) * size + last.added_bytes
        yield replace(now, gradients=gradients, activations=last.lane_bytes)
        gradients = (1 + sums.at_last) * size + first.added_bytes
        yield replace(now, optimizer=0, gradients=gradients, activations=first.lane_bytes)
    elif num_lanes == 1:
        yield replace(now, gradients=size, activations=tape.peak().lane_bytes)
    else:
        last = tape.peak(leaving(measured.weights))
        yield replace(now, gradients=size + first.added_bytes, activations=first.lane_bytes)
        yield replace(now, gradients=size + last.added_bytes, activations=last.lane_bytes)
        between = replace(now, gradients=2 * size, activations=tape.peak().lane_bytes)
        yield between if num_lanes > 2 else replace(between, optimizer=0)
    yield from moments_of_update(measured, layout, size)
