"""Reads the samples of a lane's turn, each under its own random state, and collates them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lanewise.errors import noting
from lanewise.lanes import LaneTurn, collate_seed, sample_seed
from lanewise.nested import map_leaves
from lanewise.random_state import set_random_state


@dataclass(frozen=True)
class LaneBatch:
    """The micro-batch of one lane in one step."""

    turn: LaneTurn
    indices: tuple[int, ...]
    """Dataset indices of the samples; empty where the process has none in this step."""
    data: Any
    """What `collate` returned; None where there are no samples."""
    eval_dataset: str = ""
    """Name of the dataset that is evaluated; empty in training."""

    @property
    def place(self) -> str:
        """Say which batch this is, for an error."""
        turn, samples = self.turn, f"samples {list(self.indices)}"
        if self.eval_dataset:
            return (
                f"in eval dataset {self.eval_dataset}, lane {turn.lane}, micro-batch {turn.step}, {samples}"
            )
        return f"in step {turn.step}, lane {turn.lane}, {samples}"

    def pin_memory(self) -> "LaneBatch":
        """Return the batch in page-locked memory, from which a GPU copies by itself. DataLoader calls it."""
        return replace(self, data=map_leaves(_pin, self.data))


class LaneReader(Dataset[LaneBatch]):
    """A dataset whose index is a lane's turn with its sample indices, and whose item is the lane's batch.

    A sample is read under random state from (seed, epoch, sample index). Where the dataset has
    `__getitems__`, the turn's samples are one read, under the state of the first one. They are collated under
    (seed, step, lane). So the bytes don't depend on which process reads them, nor on what it read before.

    Args:
        dataset: map-style.
        collate: makes a micro-batch of samples.
        seed: seed of the run.
        eval_dataset: what to call the dataset in an error, if it is evaluated.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        seed: int,
        *,
        eval_dataset: str = "",
    ) -> None:
        self.eval_dataset = eval_dataset
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, index: tuple[LaneTurn, tuple[int, ...]]) -> LaneBatch:
        """Read and collate one lane's samples."""
        turn, indices = index
        empty = LaneBatch(turn, indices, None, self.eval_dataset)
        if not indices:
            return empty
        with _one_thread(), noting(lambda: empty.place):
            samples = self.read(turn.epoch, indices)
            set_random_state(collate_seed(self._seed, turn.step, turn.lane))
            data = self._collate(samples)
        return replace(empty, data=data)

    def read(self, epoch: int, indices: tuple[int, ...]) -> list[Any]:
        """Return the samples at these dataset indices, as the epoch sees them."""
        if _reads_many(self._dataset):
            set_random_state(sample_seed(self._seed, epoch, indices[0]))
            return list(self._dataset.__getitems__(list(indices)))  # type: ignore[attr-defined]
        return [self._read_one(epoch, index) for index in indices]

    def _read_one(self, epoch: int, index: int) -> Any:
        set_random_state(sample_seed(self._seed, epoch, index))
        with noting(lambda: f"in sample {index}"):
            return self._dataset[index]


def _reads_many(dataset: Dataset[Any]) -> bool:
    """Tell whether a dataset reads several samples at once; a Subset only passes the question on."""
    if isinstance(dataset, Subset):
        return _reads_many(dataset.dataset)
    return hasattr(dataset, "__getitems__")


def _pin(leaf: Any) -> Any:
    return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as DataLoader workers do, so that `num_workers` doesn't change the samples."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
