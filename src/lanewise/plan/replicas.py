"""What one process holds that drives all devices, or the first of these where each has memory of its own."""

from dataclasses import replace

from lanewise.plan.gradients import arriving
from lanewise.plan.memory import Layout, Measured, Moments, held, moments_of_update
from lanewise.plan.pending import pending_before


def moments_of_replicas(measured: Measured, layout: Layout) -> Moments:
    """Yield the moments of one process that drives all devices, or of the first of these devices."""
    tape, size, now = measured.tape, measured.gradient_bytes, held(measured, layout)
    num_others = min(layout.num_devices, layout.num_lanes) - 1
    first, again = tape.peak(arriving(measured.weights)), tape.peak()
    pending = 0
    if measured.equality == "exact":
        starts = range(0, layout.num_lanes, layout.num_devices)
        pending = max(pending_before(start, layout.num_lanes) for start in starts) * size
        # The lanes of a group come one after the other, and are added as far as the tree allows.
        num_lanes = num_others + 1
        num_held = num_lanes if measured.shares_memory else num_lanes.bit_length()
        yield replace(now, gradients=pending + num_held * size)
    if measured.shares_memory:
        waiting = num_others * tape.saved_bytes
        accumulated = num_others * size
        is_added = measured.equality == "close" and layout.num_lanes_each > 1
        # The graph of the last lane is the first one through which the backward goes.
        for gradients, saved in ((0, waiting), (accumulated, 0)):
            yield replace(
                now,
                gradients=pending + gradients + first.added_bytes,
                activations=saved + first.lane_bytes,
            )
        if is_added:
            yield replace(now, gradients=accumulated + size, activations=waiting + again.lane_bytes)
        yield replace(now, gradients=accumulated + size + pending)
    else:
        num_gathered = num_others if layout.reducer == "data_parallel" else 0
        gathered = num_gathered * (tape.output_bytes + tape.loss_bytes)
        peak = again if measured.equality == "close" and layout.num_lanes_each > 1 else first
        gradients = size if peak is again else pending + peak.added_bytes
        yield replace(now, gradients=gradients, activations=gathered + peak.lane_bytes)
    yield from moments_of_update(measured, layout, size)
