"""The batches of one step, for several passes over them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from lanewise.data import LaneBatch
from lanewise.nested import copied


@final
class StepBatches:
    """Reads the batches of a step once, and yields them each time it is iterated over.

    Args:
        batches: the batches of this process; consumed for one step.
        copies: whether to yield copies, as a forward may change its batch.
    """

    def __init__(self, batches: Iterator[LaneBatch], *, copies: bool = False) -> None:
        self._batches = batches
        self._copies = copies
        self._kept: list[LaneBatch] = []

    def __iter__(self) -> Iterator[LaneBatch]:
        yield from map(self._give, self._kept)
        while not self._kept or not self._kept[-1].turn.is_last:
            batch = next(self._batches)
            self._kept.append(batch)
            yield self._give(batch)

    def _give(self, batch: LaneBatch) -> LaneBatch:
        return replace(batch, data=copied(batch.data)) if self._copies else batch
