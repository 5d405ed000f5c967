"""Tells all processes how many forwards they run, where a forward is collective."""

from collections.abc import Iterator
from itertools import repeat

import torch

from lanewise.data import LaneBatch
from lanewise.errors import DataError
from lanewise.processes.world.world import World
from lanewise.reduce.reducer import Lane


def passes(lanes: Iterator[Lane], num_lanes: int | None, world: World) -> Iterator[Lane | None]:
    """Yield the lanes, and None for each pass that others make without this process.

    Where nobody knows how many there are, all tell each other before each pass whether they go on.

    Collective: every rank must iterate to the end.

    Args:
        lanes: of this process; a lane without samples is yielded, and is no pass.
        num_lanes: the number of these lanes that have samples; None on every rank: nobody knows it.
        world: the processes.
    """
    if num_lanes is not None:
        num_missing = max(world.all_gather_tree(num_lanes)) - num_lanes
        yield from lanes
        yield from repeat(None, num_missing)
        return
    while True:
        lane = next(lanes, None)
        if lane is not None and not lane.batch.has_samples:
            yield lane
            continue
        goes_on = torch.tensor([lane is not None], dtype=torch.uint8, device=world.device)
        if not world.start_all_gather_to_host(goes_on)().any():
            return
        yield lane


def require_data(batch: LaneBatch) -> None:
    """Raise DataError if the samples of a lane are lost: others wait for its forward."""
    turn = batch.turn
    if not batch.has_samples and batch.data is None:
        number = turn.lane if turn.positions else 0
        raise DataError(
            f"none of the samples of lane {number} in step {turn.step + 1} can be read, and under fsdp each "
            "lane needs one. Mend the files, or use another distributed.reducer."
        )
