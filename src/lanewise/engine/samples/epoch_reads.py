"""What the processes read of the files of the training dataset in an epoch."""

import logging
from collections.abc import Iterator, Mapping

from lanewise.data import LaneBatch
from lanewise.world.world import World

logger = logging.getLogger(__name__)


class EpochReads:
    """Counts what is read for the batches of this process, and adds it up over all of them once an epoch.

    Args:
        world: the processes.
        total_bytes: of all samples; None where the dataset does not count what it reads.
    """

    def __init__(self, world: World, total_bytes: int | None) -> None:
        self._world = world
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._num_skipped = 0
        self.num_skipped_by_all = 0
        """Samples that all processes left out, in the epochs that were taken."""

    def count(self, batches: Iterator[LaneBatch]) -> Iterator[LaneBatch]:
        """Pass batches on, and count what was read for them."""
        if self._total_bytes is None:
            return batches
        return map(self._add, batches)

    def take(self, epoch: int) -> Mapping[str, float]:
        """Return what all processes read since the last call, by name; empty where nobody counts.

        Collective where the dataset counts what it reads.
        """
        if self._total_bytes is None:
            return {}
        local = self._read_bytes, self._num_skipped
        self._read_bytes = self._num_skipped = 0
        read_bytes, num_skipped = map(sum, zip(*self._world.all_gather_object(local), strict=True))
        self.num_skipped_by_all += num_skipped
        if self._world.rank == 0:
            logger.info(
                "epoch %d: %.3g MB read of %.3g MB%s",
                epoch,
                read_bytes / 1e6,
                self._total_bytes / 1e6,
                f", and {num_skipped} samples left out, as they cannot be read" if num_skipped else "",
            )
        return {
            "data/read_bytes": read_bytes,
            "data/total_bytes": self._total_bytes,
            "data/skipped_samples": num_skipped,
        }

    def _add(self, batch: LaneBatch) -> LaneBatch:
        self._read_bytes += batch.read_bytes
        if batch.turn.positions:
            self._num_skipped += len(batch.indices) - batch.num_samples
        return batch
