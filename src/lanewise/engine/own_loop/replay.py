"""Runs one lane of a step of the user's own loop again, alone."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.step.lanes import to_device
from lanewise.errors import TaskError
from lanewise.lanes import lane_seed
from lanewise.processes.device.random_state import kept_random_state, set_random_state
from lanewise.processes.world.world import World


@contextmanager
def replayed(
    batches: Iterable[LaneBatch], lane: int, models: Iterable[nn.Module], seed: int, world: World
) -> Iterator[Any]:
    """Give the micro-batch of a lane, under the random state of its first forward.

    Afterwards the random state and the buffers are as before. Gradients are the caller's.

    Args:
        batches: those of the step.
        lane: its number.
        models: the prepared ones.
        seed: that of the run.
        world: the processes.

    Raises:
        TaskError: if the lane has no samples in the step, or there are several processes.
    """
    with kept_random_state():
        by_lane = {batch.turn.lane: batch for batch in to_device(batches, world.device) if batch.has_samples}
        if world.world_size > 1 or lane not in by_lane:
            raise TaskError(
                f"a lane is replayed on one process, in a step in which it has samples: got lane {lane}, "
                f"{world.world_size} processes, and samples of the lanes {list(by_lane)}."
            )
        batch, buffers = by_lane[lane], {one: one.clone() for model in models for one in model.buffers()}
        set_random_state(lane_seed(seed, batch.turn.step, lane))
        try:
            yield batch.data
        finally:
            for buffer, before in buffers.items():
                buffer.data.copy_(before)
