"""How many bytes a process sends in a step, by formula.

A ring sends each byte of a reduction (n - 1) / n times, and as often in the gather that follows
(https://arxiv.org/abs/1802.05799). A process receives as much as it sends, and a link does both at once.
"""

from typing import NamedTuple

from lanewise.commands.plan.memory import Measured, Setting
from lanewise.commands.plan.model import ROOT
from lanewise.commands.plan.pending import pending_sums

_TOTALS_BYTES = 16
"""Bytes that a lane sends to all processes: its loss sum and its weight, as float64."""


class Traffic(NamedTuple):
    """What a process sends in a step, by the computation that can hide it."""

    of_each_lane: float
    """Bytes in each lane, beside its forward and backward."""
    of_last_backward: float
    """Bytes beside the backward of the last lane."""
    between: float
    """Bytes while nothing is computed."""

    def num_bytes(self, num_lanes: int) -> float:
        """Bytes of a step in which a process has so many lanes."""
        return self.of_each_lane * num_lanes + self.of_last_backward + self.between


def traffic_of(measured: Measured, setting: Setting) -> Traffic:
    """Return what the process that sends most sends in a step.

    Of one process that drives all devices, it is what the first device sends.
    """
    num_devices, num_lanes = setting.num_devices, setting.num_lanes
    if num_devices == 1:
        return Traffic(0, 0, 0)
    is_exact, size = measured.equality == "exact", measured.gradient_bytes
    if setting.kind.runs_on == "process":
        tape, num_others = measured.tape, num_lanes - setting.num_lanes_each
        num_gradients = num_others if is_exact else num_devices - 1
        # The outputs travel to the first device, and their gradients back.
        batches = tape.batch_bytes + 2 * tape.output_bytes * setting.kind.gathers_outputs
        weights = (num_devices - 1) * sum(weight.num_bytes for weight in measured.weights)
        return Traffic(0, 0, weights + num_gradients * size + num_others * batches)
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
        return Traffic(0, part * size * (1 + (num_sums if is_exact else 1)), between)
    of_lane = 0.0
    for weight in measured.weights:
        padded = weight.shard_bytes(num_devices) * num_devices
        num_gathers = 1 if weight.group == ROOT else 2
        of_lane += padded * (num_gathers * measured.gathered_itemsize_factor + weight.is_trained)
    return Traffic(part * of_lane, 0, between)
