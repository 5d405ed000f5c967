"""The batches of one step, for several passes over them."""

from collections.abc import Iterator

from lanewise.data import LaneBatch


class StepBatches:
    """Reads the batches of a step once, and gives them as often as they are asked for.

    Args:
        batches: of this process; consumed for one step.
    """

    def __init__(self, batches: Iterator[LaneBatch]) -> None:
        self._batches = batches
        self._kept: list[LaneBatch] = []

    @property
    def is_partly_read(self) -> bool:
        """Whether some of them, but not all, were asked for."""
        return bool(self._kept) and not self._kept[-1].turn.is_last

    def __iter__(self) -> Iterator[LaneBatch]:
        yield from self._kept
        while not self._kept or self.is_partly_read:
            batch = next(self._batches)
            self._kept.append(batch)
            yield batch
