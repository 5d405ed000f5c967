"""The order in which heavy samples come more often, or earlier."""

from dataclasses import replace
from functools import lru_cache
from typing import final

import numpy as np
import numpy.typing as npt

from lanewise.errors import ConfigError, DataError
from lanewise.lanes.orders.order import OrderInputs, SampleOrder
from lanewise.lanes.orders.permutation import uniform
from lanewise.lanes.schedule import LaneTurn


@final
class WeightedOrder(SampleOrder):
    """Draws samples by their weights.

    With replacement each draw takes a sample with a probability in proportion to its weight: a sample may
    come several times in an epoch, or not at all. Without replacement a sample comes at most once, and is as
    likely to be the next one as its weight says among those that are left [1].

    Args:
        inputs: has the table `sample_weights`: a number for each sample, not negative; one of weight 0 never
            comes.
        replacement: whether a sample that was drawn may be drawn again in the same epoch.
        num_samples: draws of an epoch; None: as many as the dataset has samples.

    Raises:
        ConfigError: if `num_samples` is not positive.
        DataError: if the weights are not one for each sample, or too few are positive.

    1. P. S. Efraimidis and P. G. Spirakis. Weighted random sampling with a reservoir. Information Processing
       Letters 97(5), 2006.
    """

    def __init__(self, inputs: OrderInputs, replacement: bool = True, num_samples: int | None = None) -> None:
        super().__init__(inputs)
        if num_samples is not None and num_samples < 1:
            raise ConfigError(f"data.order.init_args.num_samples must be at least 1: got {num_samples}.")
        self._weights = inputs.table_of_samples("sample_weights", np.float64)
        num_positive = int(np.count_nonzero(self._weights))
        num_draws = num_samples or self.schedule.num_samples
        if num_positive < (1 if replacement else num_draws):
            raise DataError(
                f"an epoch draws {num_draws} samples {'with' if replacement else 'without'} replacement, and "
                f"sample_weights has {num_positive} positive weights. Give more samples a weight, or set "
                "data.order.init_args.num_samples."
            )
        self.schedule = replace(self.schedule, num_samples=num_draws)
        self.repeats = replacement
        self._ends = np.cumsum(self._weights)
        self._ranked = lru_cache(maxsize=2)(self._rank)

    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        start, stop = turn.positions.start, turn.positions.stop
        if not self.repeats:
            return tuple(self._ranked(turn.epoch)[start:stop].tolist())
        draws = uniform(np.arange(start, stop), "draws", self.seed, turn.epoch) * self._ends[-1]
        # Rounding may lead to the very end; the last sample of a positive weight begins before it.
        found = np.minimum(np.searchsorted(self._ends, draws, side="right"), np.argmax(self._ends))
        return tuple(found.tolist())

    def _rank(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples in the order in which an epoch without replacement draws them.

        A sample's time is exponential with its weight as the rate, and the earliest comes first.
        """
        positive = np.flatnonzero(self._weights)
        times = _minus_log(uniform(positive, "times", self.seed, epoch)) / self._weights[positive]
        return positive[np.lexsort((positive, times))]


def _minus_log(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return -log of numbers in (0, 1) to nine digits, from sums, products and quotients alone.

    NumPy's own logarithm may differ in the last bit from one machine to the next, and with it the order.
    """
    fractions, exponents = np.frexp(values)  # fractions in [1/2, 1)
    ratios = (1 - fractions) / (1 + fractions)  # log x = -2 artanh((1 - x) / (1 + x))
    squares = ratios * ratios
    series = np.zeros_like(squares)
    for power in range(19, 0, -2):
        series = series * squares + 1 / power
    logs: npt.NDArray[np.float64] = 2 * ratios * series - exponents * 0.6931471805599453
    return logs
