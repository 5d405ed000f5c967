"""Counts what the processes read of the training dataset in an epoch, and what was left out."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from lanewise.data import LaneBatch
from lanewise.processes.world.world import World

logger = logging.getLogger(__name__)


@final
@dataclass
class EpochReads:
    """Counts what was read for the batches of a process; once an epoch, adds it up over all processes."""

    world: World
    """The processes."""
    total_bytes: int | None
    """The bytes of all samples; None where the dataset does not count the bytes that it reads."""
    skips: bool = False
    """Whether samples of any dataset may be left out."""
    num_skipped_by_all: int = field(default=0, init=False)
    """Number of samples that all processes left out, in all epochs for which `take` was called."""
    _read_bytes: int = field(default=0, init=False)
    _num_skipped: int = field(default=0, init=False)

    def count(self, batches: Iterator[LaneBatch]) -> Iterator[LaneBatch]:
        """Yield the batches, and count what was read for them."""
        if self.total_bytes is None and not self.skips:
            return batches
        return map(self._add, batches)

    def take(self, epoch: int) -> Mapping[str, float]:
        """Return by name the bytes that all processes read since the last call, and the samples left out.

        The result is empty where nothing is counted. Otherwise this is collective: every rank must call it.
        """
        if self.total_bytes is None and not self.skips:
            return {}
        local = self._read_bytes, self._num_skipped
        self._read_bytes = self._num_skipped = 0
        read_bytes, num_skipped = map(sum, zip(*self.world.all_gather_tree(local), strict=True))
        self.num_skipped_by_all += num_skipped
        said = [f"{num_skipped} samples left out, as they cannot be read"] if num_skipped else []
        values = {"data/skipped_samples": num_skipped}
        if self.total_bytes is not None:
            if said or read_bytes != self.total_bytes:
                said.insert(0, f"{read_bytes / 1e6:.3g} MB read of {self.total_bytes / 1e6:.3g} MB")
            values = {"data/read_bytes": read_bytes, "data/total_bytes": self.total_bytes, **values}
        if self.world.rank == 0 and said:
            logger.info("epoch %d: %s", epoch + 1, ", and ".join(said))
        return values

    def _add(self, batch: LaneBatch) -> LaneBatch:
        self._read_bytes += batch.read_bytes
        self._num_skipped += len(batch.indices) - batch.num_samples
        return batch
