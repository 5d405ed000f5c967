"""In which order a run visits the samples of its dataset."""

from typing import Protocol

from lanewise.lanes.feistel import FeistelOrder
from lanewise.lanes.schedule import LaneTurn


class SampleOrder(Protocol):
    """Which samples a lane reads in a step: a pure function, on which no other process has an influence.

    It is asked for any turn at any time, and answers at once: so a run goes on in the middle of an epoch
    without a replay, and each process finds its share without communicating. Over the turns of an
    epoch each sample comes at most once, and exactly once where no step is dropped.
    """

    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        """Return the dataset indices that a lane reads in a step, as many as the turn has positions."""


class SequentialOrder:
    """Every epoch visits the samples from first to last."""

    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        """See `SampleOrder`."""
        return tuple(turn.positions)


def choose_order(num_samples: int, *, seed: int, shuffle: bool) -> SampleOrder:
    """Return the order of a dataset with random access.

    Args:
        num_samples: how many samples it has, from 0 to 2**62.
        seed: any integer; other seeds give unrelated orders.
        shuffle: whether each epoch has an order of its own.
    """
    return FeistelOrder(num_samples, seed=seed) if shuffle else SequentialOrder()
