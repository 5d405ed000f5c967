"""Streams of plain numbers, and what a few processes read of them in step."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lanewise.data import LaneBatch, StreamCut, StreamLoader, StreamReader
from lanewise.lanes import lane_ranges


class Lengths:
    """A lane-aware stream of (epoch, lane, number, a random number), with so many samples in each lane."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.opened: list[tuple[int, int]] = []

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        """Draw from the default generator, so that the random state is seen."""
        assert num_lanes == len(self.lengths)
        self.opened.append((epoch, lane))
        return ((epoch, lane, number, int(torch.randint(10**9, ()))) for number in range(self.lengths[lane]))


class Cursor:
    """An iterator with a state."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples
        self.position = 0
        self.num_read = 0

    def __iter__(self) -> "Cursor":
        return self

    def __next__(self) -> Any:
        if self.position == len(self.samples):
            raise StopIteration
        self.position += 1
        self.num_read += 1
        return self.samples[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self.position = state["position"]


class LengthsWithState(Lengths):
    """The same, without random numbers and with a state."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(*lengths)
        self.cursors: list[Cursor] = []

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Cursor:
        """Return an iterator with a state."""
        samples = [(epoch, lane, number, 0) for number in range(self.lengths[lane])]
        self.cursors.append(Cursor(samples))
        return self.cursors[-1]


class Numbers(IterableDataset[Any]):
    """A plain stream of (number, a random number)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return ((number, int(torch.randint(10**9, ()))) for number in range(self.size))


class NumbersWithState(IterableDataset[Any]):
    """A plain stream of (number, 0), whose state the dataset has."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cursor = Cursor([])
        self.begins_with = 0

    def __iter__(self) -> Iterator[Any]:
        self.cursor = Cursor([(number, 0) for number in range(self.size)])
        self.cursor.position = self.begins_with
        self.begins_with = 0
        return self.cursor

    def state_dict(self) -> dict[str, Any]:
        """Return where the iterator is."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin there."""
        self.begins_with = state["position"]


class OneByOne(StreamReader):  # type: ignore[misc]  # a test's own
    """Reads in one thread at a time, as they share the default generator."""

    lock = threading.Lock()

    def __getitem__(self, index: tuple[int, int]) -> LaneBatch:
        with self.lock:
            return super().__getitem__(index)


class Ranks:
    """Exchanges values between threads, as processes do."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.told: list[Any] = [None] * world_size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what all threads gave."""
        self.told[rank] = value
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told


def read(
    make_stream: Callable[[], Any],
    world_size: int,
    *,
    num_lanes: int = 4,
    micro_batch_size: int = 2,
    shuffle_buffer: int = 0,
    num_epochs: int = 2,
    num_steps: int | None = None,
    state: Any = None,
    **options: Any,
) -> tuple[list[dict[int, Any]], Any]:
    """Read all steps on so many processes, which threads stand for.

    Args:
        make_stream: makes the stream of each process.
        world_size: processes.
        num_lanes: of the cut.
        micro_batch_size: of the cut.
        shuffle_buffer: of the cut.
        num_epochs: after which the run ends.
        num_steps: after which to stop; None: at the end.
        state: of a run that is resumed.
        options: of `StreamLoader`.

    Returns:
        For each step the samples of each lane, and the state after the last step.
    """
    ranks = Ranks(world_size)
    cut = StreamCut.of(num_lanes, micro_batch_size, shuffle_buffer)

    def of_rank(rank: int, lanes: range) -> tuple[list[dict[int, Any]], Any]:
        reader_class = StreamReader if options.get("num_workers") else OneByOne
        reader = reader_class(make_stream(), list, 7, cut, lanes)
        exchange = partial(ranks.exchange, rank)
        most = -(-num_lanes // world_size)
        loader = StreamLoader(reader, exchange, num_epochs, most_lanes=most, **options)
        first_step = 0
        if state is not None:
            loader.load_state_dict(state)
            first_step = state["first_step"] + state["num_steps"]
        batches = loader.batches(first_step, None)
        steps: list[dict[int, Any]] = []
        while not loader.is_over and len(steps) != num_steps:
            of_step: dict[int, Any] = {}
            for batch in batches:
                if batch.num_samples:
                    of_step[batch.turn.lane] = batch.data
                    assert batch.num_samples == len(batch.data) == len(batch.turn.positions)
                if batch.turn.is_last:
                    break
            present, step = batch.turn.present, batch.turn.step
            told = ranks.exchange(rank, (present, step, set(of_step), batch.to_source.numbers))
            assert {of_rank[:2] for of_rank in told} == {(present, first_step + len(steps))}
            assert len({len(of_rank[3]) for of_rank in told}) == 1
            assert set().union(*(of_rank[2] for of_rank in told)) == set(present)
            steps.append(of_step)
            batch.to_source.receive([number for of_rank in told for number in of_rank[3]])
        return steps, loader.state_dict()

    if world_size == 1:  # loader workers end with the thread that started them
        results = [of_rank(0, range(num_lanes))]
    else:
        with ThreadPoolExecutor(world_size) as pool:
            results = list(pool.map(of_rank, range(world_size), lane_ranges(num_lanes, world_size)))
    if options.get("num_workers"):
        gc.collect()  # ends the loader workers, before a later test waits for the end of its own
    assert all(state == results[0][1] for _, state in results)
    merged = [
        dict(sorted(item for of_rank in of_step for item in of_rank.items()))
        for of_step in zip(*(steps for steps, _ in results), strict=True)
    ]
    return merged, results[0][1]
