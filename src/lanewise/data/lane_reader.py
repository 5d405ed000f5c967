"""Reads the samples of a lane's turn and collates them, under the random state of the turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import Dataset, Subset

from lanewise.config import MissingName
from lanewise.data.collate import no_batch
from lanewise.data.file_dataset import FileDataset
from lanewise.data.missing import present
from lanewise.data.rows import Rows
from lanewise.errors import note_place, shorten
from lanewise.lanes import PROGRESS, LaneTurn, RunLength, read_seed, sample_seed
from lanewise.processes.device.nested import map_leaves
from lanewise.processes.device.random_state import set_random_state


class ToSource(NamedTuple):
    """What the source of the batches sends to itself on all processes; nobody else need understand it."""

    numbers: Sequence[int]
    """As many on each process."""
    receive: Callable[[Sequence[float]], None]
    """Gets those of all processes, in the order of ranks, in each pass over the lanes of the step."""


@dataclass(slots=True)
class LaneBatch:
    """The micro-batch of one lane in one step.

    Not frozen: one is made for each lane, and making a frozen one takes four times as long.
    """

    turn: LaneTurn
    indices: tuple[int, ...]
    """Dataset indices of the samples; empty where the process has none in this step."""
    data: Any
    """What `collate` returned; None if there are no samples, unless the reader's `fills_empty` is set."""
    num_samples: int
    """Samples in it: fewer than indices if a dataset leaves out what it cannot read."""
    missing: tuple[int, ...] = ()
    """Places among the indices of the samples that the dataset gave as None."""
    read_bytes: int = 0
    """Bytes that a `FileDataset` read from its files for this batch."""
    eval_dataset: str = ""
    """Name of the dataset that is evaluated; empty in training."""
    state: Any = None
    """The state of a stream from which these samples can be read again; None where it has none."""
    to_source: "ToSource | None" = None
    """What its source sends with the message of the step, in the last batch of a step; None: nothing."""
    asks_length: bool = False
    """Whether `collate` asked for the length of the run."""

    @property
    def has_samples(self) -> bool:
        """Whether it has any."""
        return self.num_samples > 0

    @property
    def own_data(self) -> Any:
        """What `collate` returned of its samples; None without any, where `data` may be that of others."""
        return self.data if self.has_samples else None

    @property
    def place(self) -> str:
        """Say which batch this is, for an error."""
        step, lane = self.turn.step, self.turn.lane
        place = f"step {step + 1}, lane {lane}"
        if self.eval_dataset:
            place = f"eval dataset {self.eval_dataset}, lane {lane}, micro-batch {step + 1}"
        return f"in {place}, samples {shorten(self.indices)}"

    def pin_memory(self) -> "LaneBatch":
        """Return the batch in page-locked memory, from which a GPU can copy it by itself; see DataLoader."""
        return replace(self, data=map_leaves(_pin, self.data))


@final
@dataclass(eq=False)
class LaneReader(Dataset[LaneBatch]):
    """A dataset whose index is a lane's turn with its sample indices, and whose item is the lane's batch.

    The samples of a turn are read and collated under one random state, which follows from (seed, dataset,
    epoch, step, lane). So the bytes depend neither on the process that reads them nor on what it read before.
    If the dataset has `__getitems__`, the turn's samples are one read. If it has `set_epoch`, whichever
    process reads a turn calls it first, as it may read ahead.
    """

    dataset: Dataset[Any]
    """Map-style."""
    collate: Callable[[Any], Any]
    """Makes a micro-batch of samples, which are a list, or `Rows` if the dataset reads these."""
    seed: int
    """Seed of the run."""
    eval_dataset: str = ""
    """The dataset's name if it is evaluated; part of the random state."""
    number: tuple[int, int] = (0, 0)
    """The dataset's number in a loop, and how often it was begun before; part of the random state."""
    length: RunLength | None = None
    """That of the run that trains on it; None where it is read for something else."""
    missing: MissingName = "error"
    """What is done with samples that the dataset gives as None."""
    warned: list[int] = field(default_factory=list)
    """The one of them that the log has named; see `read_turns`."""
    fills_empty: bool = False
    """Whether a turn without samples gets the data of others, for a forward that does not count."""

    def __post_init__(self) -> None:
        inner = self.dataset
        while isinstance(inner, Subset):  # which has `__getitems__` also where its dataset has none
            inner = inner.dataset
        self._reads_many = hasattr(inner, "__getitems__")
        self._files = inner if isinstance(inner, FileDataset) else None
        self._by_epoch: Any = next((one for one in (self.dataset, inner) if hasattr(one, "set_epoch")), None)

    def __getitem__(self, index: tuple[LaneTurn, tuple[int, ...]]) -> LaneBatch:
        """Read and collate one lane's samples."""
        turn, indices = index
        batch = LaneBatch(turn, indices, None, 0, eval_dataset=self.eval_dataset)
        if self.length is not None:
            PROGRESS.set((turn.step, turn.epoch, self.length))
        if not indices:
            return batch
        before = 0 if self._files is None else self._files.read_bytes
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as DataLoader workers do, so that `num_workers` changes no sample
        try:
            if self._by_epoch is not None:
                self._enter(self._by_epoch, turn.epoch)
            seed = read_seed(self.seed, self.number, self.eval_dataset, turn.epoch, turn.step, turn.lane)
            set_random_state(seed)
            samples, batch.missing = self._read(indices)
            # A file dataset may leave some out; others may return objects that stand for several samples.
            num_given = len(indices) - len(batch.missing)
            batch.num_samples = num_given if self._files is None else len(samples)
            if batch.num_samples:
                batch.data = self.collate(samples)
                if batch.data is None:
                    raise no_batch(self.collate)
            elif self.fills_empty:
                batch.data = self._spare(len(indices))
            if not turn.positions:  # data of another lane, which don't count
                batch.indices, batch.num_samples, batch.missing = (), 0, ()
        except BaseException as error:
            note_place(error, batch.place)
            raise
        finally:
            torch.set_num_threads(num_threads)
        batch.asks_length = self.length is not None and self.length.is_asked
        batch.read_bytes = 0 if self._files is None else self._files.read_bytes - before
        return batch

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all samples; None where the dataset does not count them."""
        return None if self._files is None else self._files.total_bytes

    def streams(self) -> Iterator[Any]:
        """Yield no reader of a stream: the dataset has an index."""
        return iter(())

    def read(self, epoch: int, indices: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples at these dataset indices outside of any turn, each under its own random state.

        Those that are left out are not among them.
        Where the dataset has `__getitems__` they are one read, under the state of the first one.
        """
        if self._by_epoch is not None:
            self._enter(self._by_epoch, epoch)
        samples: list[Any] = []
        for index in indices:
            set_random_state(sample_seed(self.seed, epoch, index))
            if self._reads_many:
                return self._read(indices)[0]
            samples += self._read((index,))[0]
        return samples

    def _enter(self, dataset: Any, epoch: int) -> None:
        """Tell a dataset that has `set_epoch` the epoch of what this process reads next, once.

        It may draw, for all processes alike. An evaluation, of epoch 0, may read the same dataset in between.
        """
        if _entered[0] is not dataset or _entered[1] != epoch:
            set_random_state(sample_seed(self.seed, epoch, 0))
            dataset.set_epoch(epoch)
            _entered[:] = dataset, epoch

    def _spare(self, size: int) -> Any:
        """Return a micro-batch of the first samples that can be read; None if these are far away."""
        last = min(len(self.dataset), _MOST_TRIED * size)  # type: ignore[arg-type]
        for first in range(0, last, size):
            samples, _ = self._read(tuple(range(first, min(first + size, last))))
            if len(samples):
                return self.collate(samples)
        return None

    def _read(self, indices: tuple[int, ...]) -> tuple[Sequence[Any], tuple[int, ...]]:
        """Return what `present` does of these samples."""
        samples: list[Any] = []
        if self._reads_many:
            read = self.dataset.__getitems__(list(indices))  # type: ignore[attr-defined]
            if isinstance(read, Rows):
                return read, ()
            samples += read
        else:
            for index in indices:
                try:
                    samples.append(self.dataset[index])
                except BaseException as error:
                    note_place(error, f"in sample {index}")
                    raise
        if NoneType not in map(type, samples):
            return samples, ()
        return present(samples, indices, self.missing, self.eval_dataset)


_entered: list[Any] = [None, None]
"""The dataset of this process that was last told an epoch, and which."""
_MOST_TRIED = 100
"""How many micro-batches are read to find one that has a sample, for a forward that does not count."""


def _pin(leaf: Any) -> Any:
    return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf
