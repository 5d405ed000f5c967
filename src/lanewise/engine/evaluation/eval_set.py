"""A dataset to evaluate on, of either kind, and how a process reads the micro-batches of its lanes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from lanewise.data import (
    LaneBatch,
    LaneReader,
    StreamCut,
    StreamReader,
    is_stream,
    read_first,
    read_to_end,
    read_turns,
)
from lanewise.device.accelerator import has_streams
from lanewise.engine.samples.dataset import compare_datasets, count_samples
from lanewise.engine.samples.stream import compare_streams
from lanewise.engine.step.lanes import to_device
from lanewise.errors import DataError
from lanewise.lanes import LaneTurn, Placement, SequentialSchedule
from lanewise.world.world import World


@final
@dataclass(frozen=True)
class EvalSet:
    """A named dataset to evaluate on, each sample once."""

    name: str
    reader: LaneReader | StreamReader
    schedule: SequentialSchedule | None
    """How a dataset with an index is cut into one range for each lane; None for a stream."""
    has_metrics: bool = True
    """Whether the task's metrics accept the batches of this set; if not, only the loss is evaluated."""

    def place(self, turn: LaneTurn) -> tuple[int, int]:
        """Return what micro-batches are sorted by to have the samples in the order of the dataset."""
        is_dealt = isinstance(self.reader, StreamReader) and not self.reader.is_lane_aware
        return (turn.step, turn.lane) if is_dealt else (turn.lane, turn.step)

    def num_batches(self, lanes: range) -> int | None:
        """Return how many micro-batches lanes have; None where nobody knows, as of a stream."""
        if self.schedule is None:
            return None
        return sum(1 for turn in self.schedule.turns(lanes) if turn.positions)

    def batches(
        self, lanes: range, device: torch.device, *, num_workers: int, fills_empty: bool = False
    ) -> Iterator[LaneBatch]:
        """Yield the micro-batches of this process's lanes, `turn.is_last` with the last one of each lane.

        Where they have no samples, that is one empty micro-batch; of a stream only if `fills_empty` is set.

        Args:
            lanes: the lanes of this process.
            device: the device to which batches are moved.
            num_workers: number of loader processes. For a dataset in blocks and a plain stream at most one is
                used, since each of several would read everything.
            fills_empty: whether an empty micro-batch gets the first data of another lane, for a forward that
                does not count.
        """
        pin_memory = has_streams(device)
        if self.schedule is None:
            batches = self._read_stream(lanes, num_workers, pin_memory=pin_memory, fills_empty=fills_empty)
        else:
            if hasattr(self.reader.dataset, "block_sizes"):
                num_workers = min(num_workers, 1)
            spare = next(self.schedule.turns(range(1))).positions if fills_empty else ()
            turns = ((turn, tuple(turn.positions or spare)) for turn in self.schedule.turns(lanes))
            batches = read_turns(self.reader, turns, num_workers, pin_memory=pin_memory)
        yield from to_device(batches, device)

    def _read_stream(
        self, lanes: range, num_workers: int, *, pin_memory: bool, fills_empty: bool
    ) -> Iterator[LaneBatch]:
        assert isinstance(self.reader, StreamReader)
        batch = None
        for batch in read_to_end(self.reader, num_workers, pin_memory=pin_memory):
            yield batch
        if batch is None and fills_empty:
            first = read_first(self.reader)
            turn = LaneTurn(0, 0, lanes.start, range(0), (), is_last=True)
            yield replace(first, turn=turn, indices=(), num_samples=0)


def build_eval_set(
    name: str,
    dataset: Any,
    collate: Callable[[Any], Any],
    seed: int,
    *,
    samples_per_lane: int,
    world: World,
    placement: Placement,
) -> EvalSet:
    """Cut a dataset into lanes, after comparing it between ranks. Collective: every rank must call this.

    Args:
        name: of the dataset; part of the random state under which it is read.
        dataset: map-style or a stream, the same on every rank.
        collate: makes a micro-batch of samples.
        seed: seed of the run.
        samples_per_lane: the largest number of samples that a lane gives to one forward.
        world: the processes.
        placement: which process carries which lanes.

    Raises:
        DataError: if the dataset is empty, or differs between ranks.
        TaskError: if it is neither map-style nor a stream.
    """
    if is_stream(dataset):
        cut = StreamCut.of(placement.num_lanes, samples_per_lane, 0)
        stream = StreamReader(dataset, collate, seed, cut, placement.own, eval_dataset=name)
        compare_streams(stream, world)
        return EvalSet(name, stream, None)
    num_samples = count_samples(dataset)
    if not num_samples:
        raise DataError(f"the eval dataset {name} is empty. Check its path, or leave it out.")
    reader = LaneReader(dataset, collate, seed, eval_dataset=name)
    compare_datasets(reader, num_samples, world)
    return EvalSet(name, reader, SequentialSchedule(num_samples, placement.num_lanes, samples_per_lane))
