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
    """

    def __init__(self, batches: Iterator[LaneBatch]) -> None:
        self._batches = batches
        self._kept: list[LaneBatch] = []

    @property
    def first(self) -> LaneBatch:
        """The first batch of the step."""
        return next(iter(self))

    def __iter__(self) -> Iterator[LaneBatch]:
        yield from self._kept
        while not self._kept or not self._kept[-1].turn.is_last:
            batch = next(self._batches)
            self._kept.append(batch)
            yield batch

    def copies(self) -> Iterator[LaneBatch]:
        """Yield copies, for a forward that may change its batch and is not the last one."""
        for batch in self:
            yield replace(batch, data=copied(batch.data))
