"""The lanes of a stream that a process carries, each of which is read one micro-batch ahead."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, final

from lanewise.data.lane_reader import LaneBatch
from lanewise.data.stream import StreamReader
from lanewise.data.workers import deal, read_turns, worker_shares


@final
@dataclass(eq=False)
class StreamLanes:
    """The micro-batches of the lanes of a process, each taken lane by lane, and how large the next one is.

    A lane lives in one loader worker, and a plain stream in a single one.
    """

    reader: StreamReader
    """Reads the micro-batches of its lanes."""
    num_workers: int
    """Processes that read ahead; 0 reads in this one. The batches are the same."""
    _: KW_ONLY
    pin_memory: bool
    """Whether batches lie in page-locked memory, for a GPU."""
    lane_after_lane: bool = False
    """Whether a worker reads each of its lanes to the end before the next one; otherwise they alternate."""

    def __post_init__(self) -> None:
        lanes = self.reader.lanes
        self.num_workers = min(self.num_workers, len(lanes) if self.reader.is_lane_aware else 1)
        self.shares = worker_shares(lanes, self.num_workers)
        """The lanes of each worker."""
        self._asked = _Asked(self.shares, 1 if self.lane_after_lane else len(lanes))
        self._queues: dict[int, deque[LaneBatch]] = {}

    def open(self, epoch: int, ended: Iterable[int] = (), first_step: int = 0) -> None:
        """Begin an epoch, whose first step has a number, and in which some lanes may have ended before."""
        self._asked.begin(epoch, ended, first_step)
        self._queues = {lane: deque() for lane in self.reader.lanes}

    def num_next(self, lane: int) -> int:
        """Return how many samples the next micro-batch of a lane takes, for which it is read; 0 at the end.

        Those that are left out of it count.
        """
        queue = self._queues[lane]
        while not queue and lane not in self._asked.ended:
            self._read_one()
        return len(queue[0].indices) if queue else 0

    def take(self, lane: int) -> LaneBatch:
        """Return the next micro-batch of a lane, which must have one, after reading the one that follows."""
        batch = self._queues[lane].popleft()
        self.num_next(lane)
        return batch

    def states(self) -> dict[int, Any]:
        """Return for each lane the state of the stream from which its next micro-batch can be read again."""
        states = {lane: queue[0].state for lane, queue in self._queues.items() if queue}
        return {lane: state for lane, state in states.items() if state is not None}

    @cached_property
    def _batches(self) -> Iterator[LaneBatch]:
        """What is read, over all epochs. Workers begin to read ahead when this is first asked for."""
        return read_turns(self.reader, self._asked, self.num_workers, pin_memory=self.pin_memory)

    def _read_one(self) -> None:
        """Read a micro-batch, of whichever lane is the next to be read."""
        batch = next(self._batches)
        if batch.turn.epoch != self._asked.epoch:
            return  # it was asked for when nobody knew that the epoch had ended
        if batch.indices:
            self._queues[batch.turn.lane].append(batch)
        if len(batch.indices) < self.reader.cut.micro_batch_size:
            self._asked.ended.add(batch.turn.lane)


@dataclass
class _Asked:
    """What the workers are asked for: again and again, as long as a lane has not ended, its next micro-batch.

    It does not refer to what is read, so that the workers end as soon as nobody does.
    """

    shares: Sequence[range]
    at_once: int
    """How many lanes of a worker alternate."""
    epoch: int = -1
    ended: set[int] = field(default_factory=set)
    """The lanes that are known to have ended."""
    first_step: int = 0

    def begin(self, epoch: int, ended: Iterable[int], first_step: int) -> None:
        """Ask for the lanes of an epoch that have not ended before."""
        self.epoch, self.ended, self.first_step = epoch, {*ended}, first_step

    def __iter__(self) -> Iterator[tuple[int, int, int] | None]:
        while True:
            going = ([lane for lane in share if lane not in self.ended] for share in self.shares)
            of_workers: list[Sequence[int | None]] = [lanes[: self.at_once] or [None] for lanes in going]
            for lane in deal(of_workers):
                yield None if lane is None else (self.epoch, lane, self.first_step)
