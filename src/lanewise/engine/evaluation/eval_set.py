"""A dataset to evaluate on, of either kind, and how a process reads the micro-batches of its lanes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch

from lanewise.config import MissingName
from lanewise.data import LaneBatch, LaneReader, StreamCut, StreamReader, is_stream, read_first, read_to_end
from lanewise.data.workers import deal, read_turns, worker_shares
from lanewise.engine.samples.dataset import compare_datasets, count_samples
from lanewise.engine.samples.stream import compare_streams, describe_stream
from lanewise.engine.step.lanes import to_device
from lanewise.errors import DataError
from lanewise.lanes import LaneTurn, Placement, SequentialSchedule
from lanewise.processes.device.accelerator import has_streams
from lanewise.processes.device.nested import copied
from lanewise.processes.world.world import World


@final
@dataclass(frozen=True)
class IndexedSet:
    """A named dataset with an index to evaluate on, each sample once."""

    name: str
    reader: LaneReader
    schedule: SequentialSchedule
    """How it is cut into one range for each lane."""
    has_metrics: bool = True
    """Whether the task's metrics accept its batches; if not, only the loss is evaluated."""
    pin_memory: bool = True
    """Whether batches for an accelerator wait in page-locked memory."""

    def place(self, turn: LaneTurn) -> tuple[int, int]:
        """Return what micro-batches are sorted by to have the samples in the order of the dataset."""
        return turn.lane, turn.step

    def num_batches(self, lanes: range) -> int | None:
        """Return how many micro-batches lanes have; None where nobody knows, as of a stream."""
        return sum(1 for turn in self.schedule.turns(lanes) if turn.positions)

    def num_samples(self, lanes: range) -> int | None:
        """Return how many samples lanes have; None where nobody knows, as of a stream."""
        return sum(len(turn.positions) for turn in self.schedule.turns(lanes))

    def describe(self, num_workers: int, world: World, placement: Placement) -> None:
        """Log what it costs to read a stream, or if loader workers are idle."""

    def batches(
        self, lanes: range, device: torch.device, *, num_workers: int, fills_empty: bool = False
    ) -> Iterator[LaneBatch]:
        """Yield the micro-batches of this process's lanes, `turn.is_last` with the last one of each lane.

        Lane comes after lane; of a stream, and of a dataset in blocks, each loader worker has lanes of its
        own, so that as many lanes come at a time. Lanes without samples have one empty micro-batch, of a
        stream only if `fills_empty` is set.

        Args:
            lanes: the lanes of this process.
            device: the device to which batches are moved.
            num_workers: number of loader processes.
            fills_empty: whether an empty micro-batch gets the data of others, for a forward that does not
                count.
        """
        spare = next(self.schedule.turns(range(1))).positions if fills_empty else ()
        shares: Sequence[range] = [lanes]
        if hasattr(self.reader.dataset, "block_sizes"):
            shares = worker_shares(lanes, num_workers)
            num_workers = min(num_workers, len(shares))

        def requests(share: range) -> Iterator[tuple[LaneTurn, tuple[int, ...]]]:
            for turn in self.schedule.turns(share):
                if turn.positions or turn.lane == lanes.start:  # the one without samples is of the process
                    yield turn, tuple(turn.positions or spare)

        dealt = deal(map(requests, shares))
        pins = self.pin_memory and has_streams(device)
        reader = replace(self.reader, fills_empty=fills_empty)
        return to_device(read_turns(reader, dealt, num_workers, pin_memory=pins), device)


@final
@dataclass(frozen=True)
class StreamSet:
    """A named stream to evaluate on, each sample once."""

    name: str
    reader: StreamReader
    pin_memory: bool = True
    has_metrics = True

    def place(self, turn: LaneTurn) -> tuple[int, int]:
        return (turn.lane, turn.step) if self.reader.is_lane_aware else (turn.step, turn.lane)

    def num_batches(self, lanes: range) -> int | None:
        return None

    num_samples = num_batches

    def describe(self, num_workers: int, world: World, placement: Placement) -> None:
        describe_stream(self.reader, num_workers, world, placement)

    def batches(
        self, lanes: range, device: torch.device, *, num_workers: int, fills_empty: bool = False
    ) -> Iterator[LaneBatch]:
        batch = spare = None
        read = read_to_end(self.reader, num_workers, pin_memory=self.pin_memory and has_streams(device))
        for batch in to_device(read, device):
            if fills_empty and not batch.has_samples:
                spare = spare or read_first(self.reader)
                yield from to_device([replace(batch, data=copied(spare.data))], device)
            else:
                yield batch
        if batch is None and fills_empty:
            turn = LaneTurn(0, 0, lanes.start, range(0), (), is_last=True)
            first = replace(read_first(self.reader), turn=turn, indices=(), num_samples=0, missing=())
            yield from to_device([first], device)


EvalSet: TypeAlias = IndexedSet | StreamSet
"""What can be evaluated on."""


def no_sample(name: str) -> DataError:
    """Return the error about an eval dataset that gave no sample."""
    return DataError(
        f"the eval dataset {name} gave no sample. It must give the same each time, and not None for each."
    )


def build_eval_set(
    name: str,
    dataset: Any,
    collate: Callable[[Any], Any],
    seed: int,
    *,
    samples_per_lane: int,
    world: World,
    placement: Placement,
    missing: MissingName = "error",
) -> EvalSet:
    """Cut a dataset into lanes, after comparing it between ranks. Collective: every rank must call this.

    Args:
        name: the name of the dataset; part of the random state under which it is read.
        dataset: map-style or a stream, the same on every rank.
        collate: makes a micro-batch of samples.
        seed: seed of the run.
        samples_per_lane: the largest number of samples that a lane gives to one forward.
        world: the processes.
        placement: which process carries which lanes.
        missing: what is done with samples that the dataset gives as None.

    Raises:
        DataError: if the dataset is empty, or differs between ranks.
        TaskError: if it is neither map-style nor a stream.
    """
    if is_stream(dataset):
        cut = StreamCut.of(placement.num_lanes, samples_per_lane, 0)
        stream = StreamReader(dataset, collate, seed, cut, placement.own, eval_dataset=name, missing=missing)
        compare_streams(stream, world)
        return StreamSet(name, stream)
    num_samples = count_samples(dataset)
    if not num_samples:
        raise DataError(f"the eval dataset {name} is empty. Check its path, or leave it out.")
    reader = LaneReader(dataset, collate, seed, eval_dataset=name, missing=missing)
    compare_datasets(reader, num_samples, world)
    return IndexedSet(name, reader, SequentialSchedule(num_samples, placement.num_lanes, samples_per_lane))
