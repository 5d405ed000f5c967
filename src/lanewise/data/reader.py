"""Reads the samples of a lane's turn and collates them, under the random state of the turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lanewise.data.file_dataset import FileDataset
from lanewise.data.rows import Rows
from lanewise.errors import note_place
from lanewise.lanes import LaneTurn, read_seed, sample_seed
from lanewise.nested import map_leaves
from lanewise.random_state import set_random_state


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

    The samples of a turn are read, and collated, under one random state from (seed, dataset, epoch, step,
    lane). So the bytes don't depend on which process reads them, nor on what it read before. Where the
    dataset has `__getitems__`, the turn's samples are one read.

    Args:
        dataset: map-style.
        collate: makes a micro-batch of samples: of a list, or of `Rows` where the dataset reads such.
        seed: seed of the run.
        eval_dataset: the dataset's name, if it is evaluated; part of the random state.
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
        self.seed = seed
        inner = _without_subsets(dataset)
        self._reads_many = hasattr(inner, "__getitems__")  # a Subset only passes the question on
        self._files = inner if isinstance(inner, FileDataset) else None
        self.number = (0, 0)
        """Which of a loop's datasets it is, and how often that was begun before; part of the random state."""

    def __getitem__(self, index: tuple[LaneTurn, tuple[int, ...]]) -> LaneBatch:
        """Read and collate one lane's samples."""
        batch = LaneBatch(*index, None, 0, 0, self.eval_dataset)
        if not batch.indices:
            return batch
        files = self._files
        before = 0 if files is None else files.read_bytes
        try:
            with _OneThread():
                self._fill(batch)
        except BaseException as error:
            note_place(error, batch.place)
            raise
        if files is not None:
            batch.read_bytes = files.read_bytes - before
        return batch

    def _fill(self, batch: LaneBatch) -> None:
        turn = batch.turn
        set_random_state(
            read_seed(self.seed, self.number, self.eval_dataset, turn.epoch, turn.step, turn.lane)
        )
        samples = self._read(batch.indices)
        # A file dataset may leave some out; others may hand out what stands for several samples.
        batch.num_samples = len(batch.indices) if self._files is None else len(samples)
        if batch.num_samples:
            batch.data = self._collate(samples)

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all samples; None where the dataset does not count them."""
        return None if self._files is None else self._files.total_bytes

    def read(self, epoch: int, indices: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples at these dataset indices outside of any turn, each under its own random state.

        Where the dataset has `__getitems__` they are one read, under the state of the first one.
        """
        samples: list[Any] = []
        for index in indices:
            set_random_state(sample_seed(self.seed, epoch, index))
            if self._reads_many:
                return self._read(indices)
            samples += self._read((index,))
        return samples

    def _read(self, indices: tuple[int, ...]) -> Sequence[Any]:
        if self._reads_many:
            read = self.dataset.__getitems__(list(indices))  # type: ignore[attr-defined]
            return read if isinstance(read, Rows) else list(read)
        samples = []
        for index in indices:
            try:
                samples.append(self.dataset[index])
            except BaseException as error:
                note_place(error, f"in sample {index}")
                raise
        return samples


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
