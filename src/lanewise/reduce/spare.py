"""A batch for a process that has none left while others run collective forwards."""

import copy
from collections.abc import Sequence
from typing import Any, Generic

import torch

from lanewise.reduce.reducer import Lane
from lanewise.world.accelerator import move
from lanewise.world.world import World


class Spare(Generic[Lane]):
    """A batch that a process can run again where it has fewer than others; fsdp.py has the reason."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._had_batch = [False] * world.world_size
        self._lane: Lane | None = None
        self._data: Any = None

    def keep(self, lane: Lane, counts: Sequence[int]) -> None:
        """Keep the first batch that there is. Collective: every rank must call this, with the same counts.

        Args:
            lane: the next one of this process.
            counts: how many batches each rank has in this step.
        """
        if self._lane is None:
            self._lane = lane
        if self._data is None and lane.turn.positions:  # as it is before a forward, which may change it
            self._data = copy.deepcopy(move(lane.data, torch.device("cpu")))
        had_batch = [bool(count) or before for count, before in zip(counts, self._had_batch, strict=True)]
        if not all(had_batch):
            of_first_rank = self._world.all_gather_object(self._data if self._world.rank == 0 else None)[0]
            self._data = of_first_rank if self._data is None else self._data
        self._had_batch = [True] * len(counts)  # those that had none have one of rank 0 now

    def take(self) -> tuple[Lane, Any]:
        """Return a lane of this process, and a copy of the batch on the device."""
        assert self._lane is not None
        return self._lane, move(copy.deepcopy(self._data), self._world.device)
