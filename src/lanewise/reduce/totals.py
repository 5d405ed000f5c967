"""The scalars of a step: one all-gather of a row for each lane, folded alike on every rank."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from lanewise.lanes import lane_ranges
from lanewise.world.accelerator import float64_device
from lanewise.world.world import World


class LocalTotals(NamedTuple):
    """What a lane of this process tells the others in a step."""

    loss: torch.Tensor | float
    """The lane's sum is `factor` times this: a number, or on an accelerator a scalar; 0.0 for weight 0."""
    factor: float
    weight: float


class LaneTotals(NamedTuple):
    """What one lane told all processes in a step."""

    lane: int
    loss_sum: float
    weight: float


class StepTotals:
    """What all lanes together say of a step; the same on every rank, for any number of processes.

    Args:
        rows: loss sum and weight of each lane with samples, from lane 0 on.
        wants_save: whether some rank voted to save a checkpoint after this step.
        wants_stop: whether some rank voted to stop the run after this step.
        buffer_changes: for `LaneBuffers.merge`: what the lanes did to each buffer.
    """

    def __init__(
        self,
        rows: Sequence[tuple[float, float]],
        *,
        wants_save: bool = False,
        wants_stop: bool = False,
        buffer_changes: Sequence[float] = (),
    ) -> None:
        self._rows = rows
        self.wants_save = wants_save
        self.wants_stop = wants_stop
        self.buffer_changes = buffer_changes
        self.loss_sum = _sum([loss_sum for loss_sum, _ in rows])
        """NaN where some lane's loss is not finite."""
        self.weight = _sum([weight for _, weight in rows])
        """Weight of the global batch."""

    @property
    def loss(self) -> float:
        """Weighted mean of the loss over the global batch; NaN where the weight is 0."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def allow_update(self) -> bool:
        """Whether the model may be updated: some weight, and no lane whose loss is not finite."""
        return self.weight > 0 and not math.isnan(self.loss_sum)

    @property
    def lanes(self) -> list[LaneTotals]:
        """The lanes with samples, in order."""
        return [LaneTotals(lane, *row) for lane, row in enumerate(self._rows)]


def _sum(values: Sequence[float]) -> float:
    """Add up without rounding in between, so that the order makes no difference; NaN if one is not finite."""
    try:
        total = math.fsum(values)
    except (ValueError, OverflowError):  # infinite ones of both signs, or finite ones beyond the range
        return math.nan
    return total if math.isfinite(total) else math.nan


def start_totals(
    world: World,
    num_lanes: int,
    num_present_lanes: int,
    local: Sequence[LocalTotals],
    votes: tuple[bool, bool] = (False, False),
    buffer_changes: Sequence[float] | torch.Tensor = (),
) -> Callable[[], StepTotals]:
    """Begin to exchange the scalars of a step.

    Collective: every rank must call this, before the backward of its last lane, which the exchange overlaps.

    Args:
        world: the processes.
        num_lanes: lanes of the run.
        num_present_lanes: lanes that have samples in this step.
        local: the rows of this process's lanes that have samples.
        votes: whether this process wants to save, and to stop the run, after this step.
        buffer_changes: what `LaneBuffers.changes` tells, of as many groups on every rank.

    Returns:
        A function that waits and returns the totals.
    """
    if world.world_size == 1 and world.device.type == "cpu":
        return partial(_totals_of_one_process, local, votes, buffer_changes)
    ranges = lane_ranges(num_lanes, world.world_size)
    # A row for each lane, the votes, the buffers.
    is_on_cpu = world.device.type == "cpu"
    absent = [(0.0, 0.0)] * (len(ranges[0]) - len(local))
    known = [(row.loss * row.factor if is_on_cpu else row.factor, row.weight) for row in local]
    table = [*known, *absent, votes]
    if is_on_cpu:
        numbers = [*chain.from_iterable(table), *buffer_changes]
        wait = world.start_all_gather(torch.tensor(numbers, dtype=torch.float64))
    else:
        device = float64_device(world.device)
        rows = torch.tensor(table, dtype=torch.float64).to(device, non_blocking=True)
        if local:
            zero = torch.zeros((), device=world.device)
            losses = [row.loss if isinstance(row.loss, torch.Tensor) else zero for row in local]
            rows[: len(local), 0] *= torch.stack([loss.to(device).double() for loss in losses])
        changes = [buffer_changes] if isinstance(buffer_changes, torch.Tensor) else []
        wait = world.start_all_gather_to_host(torch.cat([rows.flatten(), *changes]))

    def finish() -> StepTotals:
        gathered = wait()
        rank_rows = gathered[:, : 2 * len(table)].view(world.world_size, len(table), 2).tolist()
        lanes = [
            (loss_sum, weight)
            for lanes_of_rank, rank_row in zip(ranges, rank_rows, strict=True)
            for lane, (loss_sum, weight) in zip(lanes_of_rank, rank_row, strict=False)
            if lane < num_present_lanes
        ]
        saves, stops = zip(*(rank_row[-1] for rank_row in rank_rows), strict=True)
        changes = gathered[:, 2 * len(table) :].amax(0).tolist()
        return StepTotals(lanes, wants_save=any(saves), wants_stop=any(stops), buffer_changes=changes)

    return finish


def _totals_of_one_process(
    local: Sequence[LocalTotals],
    votes: tuple[bool, bool],
    buffer_changes: Sequence[float] | torch.Tensor,
) -> StepTotals:
    """Return the same without a tensor: a small step takes no longer than those would."""
    lanes = [(float(row.loss * row.factor), row.weight) for row in local]
    saves, stops = votes
    assert not isinstance(buffer_changes, torch.Tensor), "on a CPU they are known"
    return StepTotals(lanes, wants_save=saves, wants_stop=stops, buffer_changes=buffer_changes)
