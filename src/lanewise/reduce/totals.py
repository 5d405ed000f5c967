"""The scalars of a step: one all-gather of a row for each lane, folded alike on every rank."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lanewise.lanes import lane_ranges
from lanewise.world.accelerator import float64_device
from lanewise.world.world import World


@dataclass(frozen=True)
class LocalTotals:
    """What a lane of this process tells the others in a step."""

    loss: torch.Tensor | None
    """Scalar on its device, of which the lane's sum is `factor` times; None where the weight is 0."""
    factor: float
    weight: float


@dataclass(frozen=True)
class LaneTotals:
    """What one lane told all processes in a step."""

    lane: int
    loss_sum: float
    weight: float


@dataclass(frozen=True)
class StepTotals:
    """What all lanes together say of a step; the same on every rank, for any number of processes."""

    lanes: tuple[LaneTotals, ...]
    """The lanes with samples, in order."""
    wants_save: bool = False
    """Whether some rank voted to save a checkpoint after this step."""
    wants_stop: bool = False
    """Whether some rank voted to stop the run after this step."""
    buffer_changes: tuple[float, ...] = ()
    """For `LaneBuffers.merge`: what the lanes did to each buffer."""

    @property
    def weight(self) -> float:
        """Weight of the global batch."""
        return math.fsum(lane.weight for lane in self.lanes)

    @property
    def loss(self) -> float:
        """Weighted mean of the loss over the global batch; NaN where the weight is 0."""
        loss_sums = [lane.loss_sum for lane in self.lanes]
        if not self.weight or not all(map(math.isfinite, loss_sums)):
            return math.nan
        return math.fsum(loss_sums) / self.weight

    @property
    def allow_update(self) -> bool:
        """Whether the model may be updated: some weight, and no lane whose loss is not finite."""
        return self.weight > 0 and not self.non_finite_lanes

    @property
    def non_finite_lanes(self) -> list[LaneTotals]:
        """The lanes whose loss is NaN or infinite."""
        return [lane for lane in self.lanes if not math.isfinite(lane.loss_sum)]


def start_totals(
    world: World,
    num_lanes: int,
    num_present_lanes: int,
    local: Sequence[LocalTotals],
    votes: tuple[bool, bool] = (False, False),
    buffer_changes: torch.Tensor | None = None,
) -> Callable[[], StepTotals]:
    """Begin to exchange the scalars of a step.

    Collective: every rank must call this, before the backward of its last lane, which the exchange overlaps.

    Args:
        world: the processes.
        num_lanes: lanes of the run.
        num_present_lanes: lanes that have samples in this step.
        local: the rows of this process's lanes that have samples.
        votes: whether this process wants to save, and to stop the run, after this step.
        buffer_changes: what `LaneBuffers.changes` tells: float64 [num_buffers], equally many on every rank.

    Returns:
        A function that waits and returns the totals.
    """
    if world.world_size == 1 and world.device.type == "cpu":
        return partial(_totals_of_one_process, local, votes, buffer_changes)
    ranges = lane_ranges(num_lanes, world.world_size)
    # A row for each lane, the votes, the buffers.
    device = float64_device(world.device)
    rows = torch.zeros(len(ranges[0]) + 1, 2, dtype=torch.float64)
    rows[-1] = torch.tensor(votes)
    rows = rows.to(device, non_blocking=True)
    if local:
        zero = torch.zeros((), device=world.device)
        losses = [zero if row.loss is None else row.loss for row in local]
        known = torch.tensor([(row.factor, row.weight) for row in local], dtype=torch.float64)
        rows[: len(local)] = known.to(device, non_blocking=True)
        rows[: len(local), 0] *= torch.stack([loss.to(device).double() for loss in losses])
    flat = rows.flatten() if buffer_changes is None else torch.cat([rows.flatten(), buffer_changes])
    wait = world.start_all_gather_to_host(flat)

    def finish() -> StepTotals:
        gathered = wait()
        rank_rows = gathered[:, : rows.numel()].view(world.world_size, *rows.shape).tolist()
        lanes = tuple(
            LaneTotals(lane, *row)
            for lanes_of_rank, rank_row in zip(ranges, rank_rows, strict=True)
            for lane, row in zip(lanes_of_rank, rank_row, strict=False)
            if lane < num_present_lanes
        )
        saves, stops = zip(*(rank_row[-1] for rank_row in rank_rows), strict=True)
        changes = gathered[:, rows.numel() :].amax(0).tolist()
        return StepTotals(lanes, any(saves), any(stops), tuple(changes))

    return finish


def _totals_of_one_process(
    local: Sequence[LocalTotals], votes: tuple[bool, bool], buffer_changes: torch.Tensor | None
) -> StepTotals:
    """Return the same without a tensor: a small step takes no longer than those would."""
    lanes = tuple(
        LaneTotals(lane, 0.0 if row.loss is None else row.loss.item() * row.factor, row.weight)
        for lane, row in enumerate(local)
    )
    changes = () if buffer_changes is None else tuple(buffer_changes.tolist())
    return StepTotals(lanes, *votes, changes)
