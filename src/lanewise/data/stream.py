"""Reads a stream, which has neither a length nor an index, as the micro-batches of lanes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import Dataset
from torch.utils.data._utils import worker

from lanewise.config import MissingName
from lanewise.data.collate import no_batch
from lanewise.data.lane_reader import LaneBatch
from lanewise.data.lane_stream import OpenStream, Stream, as_lane_stream, shards_of
from lanewise.data.missing import present
from lanewise.errors import DataError, note_place
from lanewise.lanes import PROGRESS, LaneTurn, RunLength, read_seed, stream_seed
from lanewise.lanes.orders.permutation import permutation
from lanewise.processes.device.random_state import set_random_state


class StreamCut(NamedTuple):
    """How the samples of a stream are cut into micro-batches."""

    num_lanes: int
    micro_batch_size: int
    window_steps: int
    """How many micro-batches of a lane are read at once, and shuffled where they are several."""

    @classmethod
    def of(cls, num_lanes: int, micro_batch_size: int, shuffle_buffer: int) -> "StreamCut":
        """Cut with windows of at least `shuffle_buffer` samples for each lane, in whole micro-batches."""
        return cls(num_lanes, micro_batch_size, max(1, -(-shuffle_buffer // micro_batch_size)))


class LaneStart(NamedTuple):
    """Where a run that resumes goes on."""

    epoch: int
    num_steps: int
    """Steps of the epoch that were taken."""
    states: Mapping[int, Any]
    """The state of the stream, by lane, at the begin of the window in which the lane goes on; of a plain
    stream any lane's is that of all. A lane without one is read from its beginning."""


class _MicroBatch(NamedTuple):
    samples: Sequence[Any]
    numbers: tuple[int, ...]
    """Numbers of the samples in the epoch of what was opened: a lane, or all lanes of a plain stream."""
    state: Any
    """State of the stream at the begin of the window that they are of; None where it has none."""


@final
@dataclass(eq=False)
class _Feed:
    """One pass over what was opened of a stream, dealt to its lanes.

    It is read in windows of `window_steps` micro-batches for each of its lanes, each window under a random
    state of its own, so that a window can be read again.
    """

    opened: Callable[[], Iterable[Any]]
    """Returns the samples."""
    lanes: range
    """The lanes to which the samples are dealt: one, or all where the stream is plain."""
    own: range
    """The lanes whose micro-batches are asked for."""
    cut: StreamCut
    seed: Callable[[int, int, str], int]
    """Returns the seed by which a window of a lane is read or shuffled."""

    def __post_init__(self) -> None:
        self._size = len(self.lanes) * self.cut.micro_batch_size * self.cut.window_steps
        """Samples in a window, of all lanes."""
        self._window = 0
        self._samples: OpenStream | None = None
        self._is_over = False
        self._queues: dict[int, deque[_MicroBatch]] = {lane: deque() for lane in self.own}

    def next(self, lane: int) -> _MicroBatch | None:
        """Return the next micro-batch of a lane; None at its end."""
        queue = self._queues[lane]
        while not queue and not self._is_over:
            self._read_window()
        return queue.popleft() if queue else None

    def go_on(self, start: LaneStart) -> None:
        """Go to where a run resumes, by the state there or by reading again."""
        num_windows, num_steps = divmod(start.num_steps, self.cut.window_steps)
        states = [start.states[lane] for lane in self.lanes if start.states.get(lane) is not None]
        if states and num_windows:
            self._samples = self._open(states[0])
        else:
            for self._window in range(num_windows):
                self._take()
        self._window = num_windows
        self._read_window()
        for queue in self._queues.values():
            for _ in range(min(num_steps, len(queue))):
                queue.popleft()

    def _read_window(self) -> None:
        """Read a window, and deal it to the lanes."""
        micro, num_lanes = self.cut.micro_batch_size, len(self.lanes)
        state = None if self._samples is None or not self._window else self._samples.state
        samples = self._take()
        first = self._window * self._size
        for lane, queue in self._queues.items():
            starts = range((lane - self.lanes[0]) * micro, len(samples), num_lanes * micro)
            chosen: list[Sequence[int]] = [range(at, min(at + micro, len(samples))) for at in starts]
            if self.cut.window_steps > 1:
                places = list(chain.from_iterable(chosen))
                order = permutation(len(places), "window", self.seed(self._window, lane, "shuffle"))
                shuffled = [places[number] for number in order.tolist()]
                chosen = [shuffled[at : at + micro] for at in range(0, len(places), micro)]
            for of_step in chosen:
                numbers = tuple(map(first.__add__, of_step))
                queue.append(_MicroBatch([samples[place] for place in of_step], numbers, state))
        self._window += 1

    def _take(self) -> list[Any]:
        """Read the samples of the present window, under its random state."""
        if self._samples is None:
            self._samples = self._open(None)
        set_random_state(self.seed(self._window, self.lanes[0], "read"))
        samples = self._samples.take(self._size)
        self._is_over = len(samples) < self._size
        return samples

    def _open(self, state: Any) -> OpenStream:
        """Begin to iterate, at a state where there is one; under the same random state in either case."""
        set_random_state(self.seed(0, self.lanes[0], "open"))
        return OpenStream(self.opened(), state)


@final
@dataclass(eq=False)
class StreamReader(Dataset[LaneBatch]):
    """A stream whose index is (epoch, lane), and whose item is the lane's next micro-batch in this epoch.

    The index may also have the number of the first step of the epoch, for `Task.progress`.

    An item without indices is the end of the lane in the epoch. A new epoch closes what is open. What the
    collate draws follows from (seed, dataset, epoch, step in the epoch, lane), as what the stream draws does:
    a micro-batch that was read alone is collated under the random state in which it was read.
    """

    dataset: Stream
    collate: Callable[[Any], Any]
    """Makes a micro-batch of a list of samples."""
    seed: int
    """Seed of the run."""
    cut: StreamCut
    lanes: range
    """The lanes that are asked for."""
    eval_dataset: str = ""
    """The dataset's name if it is evaluated; part of the random state."""
    missing: MissingName = "error"
    """What is done with samples that the stream yields as None."""
    warned: list[int] = field(default_factory=list)
    number: tuple[int, int] = (0, 0)
    """The dataset's number in a loop, and how often it was begun before; part of the random state."""
    start: LaneStart | None = field(default=None, init=False)
    """Where a run that resumes goes on."""
    length: RunLength | None = None

    total_bytes = None

    def __post_init__(self) -> None:
        self._stream = as_lane_stream(self.dataset)
        num_shards = shards_of(self._stream)
        self.is_lane_aware = num_shards is None or num_shards >= self.cut.num_lanes
        """Whether each lane is read alone."""
        self._reads_alone = self.is_lane_aware and self.cut.window_steps == 1
        self.close()

    def anew(self, lanes: range) -> "StreamReader":
        """Return a reader of these lanes that begins anew."""
        return replace(self, lanes=lanes)

    def of_samples(self, stream: Stream) -> "StreamReader":
        """Return a reader of single samples of a stream, in all lanes of the run."""
        num_lanes = self.cut.num_lanes
        cut = StreamCut(num_lanes, 1, 1)
        return replace(self, dataset=stream, collate=list, cut=cut, lanes=range(num_lanes))

    def streams(self) -> Iterator["StreamReader"]:
        """Yield a reader of single samples for each stream that the dataset is, or is a mixture of."""
        return map(self.of_samples, _parts(self.dataset))

    def go_on(self, start: LaneStart | None) -> None:
        """Let an epoch begin where its lanes stood, once it is closed; None: each begins with its samples."""
        self.start = start

    def close(self) -> None:
        """Close what is open: the next micro-batch of a lane is that of the begin, or of `start`."""
        self._epoch = -1
        self._feeds: dict[int, _Feed] = {}
        self._num_read: dict[int, int] = {}

    def __getitem__(self, index: tuple[int, ...]) -> LaneBatch:
        """Read and collate the next micro-batch of a lane."""
        epoch, lane, first_step = (*index, 0)[:3]
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as DataLoader workers do, so that `num_workers` changes no sample
        try:
            if epoch != self._epoch:
                self.close()
                self._epoch = epoch
            with _no_worker():
                read = self._feed(lane).next(lane)
            number = self._num_read[lane]
            self._num_read[lane] += 1
            numbers = () if read is None else read.numbers
            first = number * self.cut.micro_batch_size
            turn = LaneTurn(epoch, number, lane, range(first, first + len(numbers)), (), is_last=False)
            batch = LaneBatch(turn, numbers, None, 0, eval_dataset=self.eval_dataset)
            if read is not None:
                batch.state = read.state
                samples, batch.missing = present(read.samples, numbers, self.missing, self.eval_dataset)
                batch.num_samples = len(samples)
                if not self._reads_alone:
                    place = epoch, number, lane
                    set_random_state(read_seed(self.seed, self.number, self.eval_dataset, *place))
                if self.length is not None:
                    PROGRESS.set((first_step + number, epoch, self.length))
                if samples:
                    batch.data = self.collate(samples)
                    if batch.data is None:
                        raise no_batch(self.collate)
                batch.asks_length = self.length is not None and self.length.is_asked
        except BaseException as error:
            of = f"the eval dataset {self.eval_dataset}" if self.eval_dataset else "the stream"
            note_place(error, f"in lane {lane} of {of}, epoch {epoch + 1}")
            raise
        finally:
            torch.set_num_threads(num_threads)
        return batch

    def _feed(self, lane: int) -> _Feed:
        """Return what a lane is read from, opened where it is not yet."""
        epoch, key = self._epoch, lane if self.is_lane_aware else -1
        start = None if self.start is None or self.start.epoch != epoch else self.start
        self._num_read.setdefault(lane, 0 if start is None else start.num_steps)
        if key not in self._feeds:
            own, of_lane = self.lanes, (0, 1)
            lanes = range(self.cut.num_lanes)
            if self.is_lane_aware:
                lanes = own = range(lane, lane + 1)
                of_lane = (lane, self.cut.num_lanes)

            def seed(window: int, of_lane: int, what: str) -> int:
                name, number = self.eval_dataset, self.number
                return stream_seed(self.seed, number, name, epoch, window, of_lane, what)

            def opened() -> Iterable[Any]:
                samples = self._stream.iter_lane(epoch, *of_lane)
                if isinstance(samples, Iterable):
                    return samples
                raise DataError(
                    f"{type(self.dataset).__name__}.iter_lane must return the samples of the lane: got a "
                    f"{type(samples).__name__}. Yield them, or return an iterable."
                )

            self._feeds[key] = _Feed(opened, lanes, own, self.cut, seed)
            if start is not None:
                self._feeds[key].go_on(start)
        return self._feeds[key]


def _parts(stream: Any) -> Iterator[Any]:
    """Yield the streams of a mixture; of any other stream itself."""
    return chain.from_iterable(map(_parts, stream.streams)) if hasattr(stream, "streams") else iter([stream])


@contextmanager
def _no_worker() -> Iterator[None]:
    """Hide from a stream that a loader worker reads it: many would yield only a part of what they have."""
    info, worker._worker_info = worker._worker_info, None  # noqa: SLF001 - torch has no public way
    try:
        yield
    finally:
        worker._worker_info = info  # noqa: SLF001
