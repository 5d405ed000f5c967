"""The order in which a run visits the samples of its dataset."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from lanewise.errors import DataError
from lanewise.lanes.orders.permutation import CHUNK, FeistelShuffle
from lanewise.lanes.schedule import LaneTurn, Schedule


@dataclass(frozen=True)
class OrderInputs:
    """Everything that an order is made from: the samples of a turn depend on nothing else."""

    schedule: Schedule
    """The schedule of an epoch that visits each sample once."""
    seed: int
    """The seed of the run; other seeds give unrelated orders."""
    tables: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Functions by name that return what is known of the samples or blocks; each is called at most once."""
    used: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """The tables that an order has asked for. They must be equal on every rank."""

    def table(self, name: str, dtype: type) -> npt.NDArray[Any]:
        """Return a table: `block_sizes`, `sample_lengths` or `sample_weights`.

        Raises:
            DataError: if there is none, or it is not a sequence of finite numbers that are not negative.
        """
        if name not in self.used:
            if name not in self.tables:
                raise DataError(f"this order needs {name}, which is not given here. Use another data.order.")
            table = np.asarray(self.tables[name]())
            if table.ndim != 1 or table.dtype.kind not in "iuf":
                raise DataError(
                    f"{name} must be a sequence of numbers: got {table.dtype} of shape {table.shape}."
                )
            bad = np.flatnonzero(~(np.isfinite(table) & (table >= 0)))
            if bad.size:
                raise DataError(
                    f"{name} must be finite and not negative: got {table[bad[0]]} for {bad[0]}, and "
                    f"{bad.size - 1} more like it."
                )
            self.used[name] = table.astype(dtype)
        return self.used[name]

    def table_of_samples(self, name: str, dtype: type) -> npt.NDArray[Any]:
        """Return a table that has a number for each sample.

        Raises:
            DataError: as `table`, and if it has another length.
        """
        table = self.table(name, dtype)
        if len(table) != self.schedule.num_samples:
            raise DataError(
                f"{name} must have one number for each of the {self.schedule.num_samples} samples: "
                f"got {len(table)}."
            )
        return table


class SampleOrder(ABC):
    """Tells which samples a lane reads in a step, as a pure function of the turn.

    Any turn may be asked for at any time. So a run can go on in the middle of an epoch without a replay, and
    each process finds its share without communication. Over the turns of an epoch each sample comes at most
    once, and exactly once if no step is dropped.

    Derive from it for an order of your own, and name the class as `data.order`. The constructor's further
    arguments are its `init_args`.

    Args:
        inputs: what the order is made from.
    """

    repeats: bool = False
    """Whether a sample may come more than once in an epoch, or not at all."""
    reads_blocks: ClassVar[bool] = False
    """Whether a lane reads blocks of its own, so that one loader worker should read all turns of a lane."""

    def __init__(self, inputs: OrderInputs) -> None:
        self.inputs = inputs
        self.schedule = inputs.schedule
        """How an epoch of this order is cut into steps and lanes."""
        self.seed = inputs.seed

    @abstractmethod
    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        """Return the dataset indices that a lane reads in a step; none only where the turn has no positions.

        They are as many as the turn has positions, unless the order cuts steps in another way.
        """


@final
class SequentialOrder(SampleOrder):
    """Every epoch visits the samples from first to last."""

    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        return tuple(turn.positions)


@final
class ShuffledOrder(SampleOrder):
    """Every epoch visits the samples in an order of its own, over the whole dataset."""

    def __init__(self, inputs: OrderInputs) -> None:
        super().__init__(inputs)
        self._shuffle = FeistelShuffle(self.schedule.num_samples, seed=self.seed)

    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        chunk, first = divmod(turn.positions.start, CHUNK)
        stop = first + len(turn.positions)
        if not first < stop <= CHUNK:  # mostly they are within one chunk
            return tuple(
                self._shuffle.indices(turn.epoch, turn.positions.start, turn.positions.stop).tolist()
            )
        return tuple(self._shuffle.chunk(turn.epoch, chunk)[first:stop].tolist())
