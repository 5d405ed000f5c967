"""Reads the samples of a lane's turn, each under its own random state, and collates them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lanewise.data.file_dataset import FileDataset
from lanewise.data.rows import Rows
from lanewise.errors import note_place
from lanewise.lanes import LaneTurn, collate_seed, sample_seed
from lanewise.nested import map_leaves
from lanewise.random_state import SeededCalls

_Seed = Callable[[int], None]
"""Sets the random state of what is read next."""


@dataclass(slots=True)
class LaneBatch:
    """The micro-batch of one lane in one step.

    Not frozen: one is made for each lane, and making a frozen one takes four times as long.
    """

    turn: LaneTurn
    indices: tuple[int, ...]
    """Dataset indices of the samples; empty where the process has none in this step."""
    data: Any
    """What `collate` returned; None where there are no samples."""
    num_samples: int
    """Samples in it. Less than there are indices where a dataset leaves out what it cannot read."""
    read_bytes: int = 0
    """What a `FileDataset` read of its files for this batch, in bytes."""
    eval_dataset: str = ""
    """Name of the dataset that is evaluated; empty in training."""

    @property
    def has_samples(self) -> bool:
        """Whether it has any."""
        return self.num_samples > 0

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
        collate: makes a micro-batch of samples: of a list, or of `Rows` where the dataset reads such.
        seed: seed of the run.
        eval_dataset: what to call the dataset in an error, if it is evaluated.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[Any], Any],
        seed: int,
        *,
        eval_dataset: str = "",
    ) -> None:
        self.eval_dataset = eval_dataset
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._reads_many = _reads_many(dataset)
        inner = _without_subsets(dataset)
        self._files = inner if isinstance(inner, FileDataset) else None
        self._seeded = SeededCalls()

    def __getitem__(self, index: tuple[LaneTurn, tuple[int, ...]]) -> LaneBatch:
        """Read and collate one lane's samples."""
        batch = LaneBatch(*index, None, 0, 0, self.eval_dataset)
        if not batch.indices:
            return batch
        files = self._files
        before = 0 if files is None else files.read_bytes
        try:
            with _OneThread():
                batch.data = self._seeded(partial(self._make, batch))
        except BaseException as error:
            note_place(error, batch.place)
            raise
        if files is not None:
            batch.read_bytes = files.read_bytes - before
        return batch

    def _make(self, batch: LaneBatch, seed: _Seed) -> Any:
        """Return a batch's data, and note how many samples it has."""
        turn, batch.num_samples = batch.turn, len(batch.indices)
        samples = self._read(turn.epoch, batch.indices, seed)
        if self._files is not None:
            batch.num_samples = len(samples)  # others may hand out what stands for several samples
            if not samples:
                return None
        seed(collate_seed(self._seed, turn.step, turn.lane))
        return self._collate(samples)

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all samples; None where the dataset does not count them."""
        return None if self._files is None else self._files.total_bytes

    def read(self, epoch: int, indices: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples at these dataset indices, as the epoch sees them."""
        return self._seeded(lambda seed: self._read(epoch, indices, seed))

    def _read(self, epoch: int, indices: tuple[int, ...], seed: _Seed) -> Sequence[Any]:
        if self._reads_many:
            seed(sample_seed(self._seed, epoch, indices[0]))
            read = self.dataset.__getitems__(list(indices))  # type: ignore[attr-defined]
            return read if isinstance(read, Rows) else list(read)
        samples = []
        for index in indices:
            seed(sample_seed(self._seed, epoch, index))
            try:
                samples.append(self.dataset[index])
            except BaseException as error:
                note_place(error, f"in sample {index}")
                raise
        return samples


def _reads_many(dataset: Dataset[Any]) -> bool:
    """Tell whether a dataset reads several samples at once; a Subset only passes the question on."""
    return hasattr(_without_subsets(dataset), "__getitems__")


def _without_subsets(dataset: Dataset[Any]) -> Dataset[Any]:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _pin(leaf: Any) -> Any:
    return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf


class _OneThread:
    """Computes with one thread, as DataLoader workers do, so that `num_workers` changes no sample."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        if self._threads != 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self._threads != 1:
            torch.set_num_threads(self._threads)
