"""Reads a stream, which has neither a length nor an index, as the micro-batches of lanes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import Dataset
from torch.utils.data._utils import worker

from lanewise.data.collate import no_batch
from lanewise.data.lane_stream import OpenStream, Stream, as_lane_stream, shards_of
from lanewise.data.reader import LaneBatch
from lanewise.errors import DataError, note_place
from lanewise.lanes import LaneTurn, read_seed, stream_seed
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
    """By lane the state of the stream at the begin of the window in which the lane goes on; of a plain stream
    any lane's is that of all. A lane without one is read from its beginning."""


class _MicroBatch(NamedTuple):
    samples: Sequence[Any]
    numbers: tuple[int, ...]
    """Numbers of the samples in the epoch of what was opened: a lane, or all lanes of a plain stream."""
    state: Any
    """State of the stream at the begin of the window that they are of; None where it has none."""


@final
class _Feed:
    """One pass over what was opened of a stream, dealt to its lanes.

    It is read in windows of `window_steps` micro-batches for each of its lanes, each window under a random
    state of its own, so that a window can be read again.

    Args:
        opened: returns the samples.
        lanes: the lanes to which the samples are dealt: one, or all where the stream is plain.
        own: those of them whose micro-batches are asked for.
        cut: sizes.
        seed: returns the seed by which a window of a lane is read or shuffled.
        start: where to begin; None: at the beginning.
    """

    def __init__(
        self,
        opened: Callable[[], Iterable[Any]],
        lanes: range,
        own: range,
        cut: StreamCut,
        seed: Callable[[int, int, str], int],
        start: LaneStart | None,
    ) -> None:
        self._opened = opened
        self._lanes = lanes
        self._cut = cut
        self._seed = seed
        self._size = len(lanes) * cut.micro_batch_size * cut.window_steps
        """Samples in a window, of all lanes."""
        self._window = 0
        self._samples: OpenStream | None = None
        self._is_over = False
        self._queues: dict[int, deque[_MicroBatch]] = {lane: deque() for lane in own}
        if start is not None:
            self._go_on(start)

    def next(self, lane: int) -> _MicroBatch | None:
        """Return the next micro-batch of a lane; None at its end."""
        queue = self._queues[lane]
        while not queue and not self._is_over:
            self._read_window()
        return queue.popleft() if queue else None

    def _go_on(self, start: LaneStart) -> None:
        """Go to where a run resumes, by the state there or by reading again."""
        num_windows, num_steps = divmod(start.num_steps, self._cut.window_steps)
        states = [start.states[lane] for lane in self._lanes if start.states.get(lane) is not None]
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
        micro, num_lanes = self._cut.micro_batch_size, len(self._lanes)
        state = None if self._samples is None or not self._window else self._samples.state
        samples = self._take()
        first = self._window * self._size
        for lane, queue in self._queues.items():
            starts = range((lane - self._lanes[0]) * micro, len(samples), num_lanes * micro)
            chosen: list[Sequence[int]] = [range(at, min(at + micro, len(samples))) for at in starts]
            if self._cut.window_steps > 1:
                places = list(chain.from_iterable(chosen))
                order = permutation(len(places), "window", self._seed(self._window, lane, "shuffle"))
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
        set_random_state(self._seed(self._window, self._lanes[0], "read"))
        samples = self._samples.take(self._size)
        self._is_over = len(samples) < self._size
        return samples

    def _open(self, state: Any) -> OpenStream:
        """Begin to iterate, at a state where there is one; under the same random state in either case."""
        set_random_state(self._seed(0, self._lanes[0], "open"))
        return OpenStream(self._opened(), state)


@final
class StreamReader(Dataset[LaneBatch]):
    """A stream whose index is (epoch, lane), and whose item is the lane's next micro-batch in this epoch.

    An item without samples is the end of the lane in the epoch. A new epoch closes what is open. What the
    collate draws follows from (seed, dataset, epoch, step in the epoch, lane), as what the stream draws does:
    a micro-batch that was read alone is collated under the random state in which it was read.

    Args:
        dataset: the stream.
        collate: makes a micro-batch of a list of samples.
        seed: seed of the run.
        cut: sizes.
        lanes: the lanes that are asked for.
        eval_dataset: the dataset's name if it is evaluated; part of the random state.
    """

    total_bytes = None

    def __init__(
        self,
        dataset: Stream,
        collate: Callable[[Any], Any],
        seed: int,
        cut: StreamCut,
        lanes: range,
        *,
        eval_dataset: str = "",
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.cut = cut
        self.lanes = lanes
        self.eval_dataset = eval_dataset
        self._stream = as_lane_stream(dataset)
        num_shards = shards_of(self._stream)
        self.is_lane_aware = num_shards is None or num_shards >= cut.num_lanes
        """Whether each lane is read alone."""
        self.number = (0, 0)
        """The dataset's number in a loop, and how often it was begun before; part of the random state."""
        self.start: LaneStart | None = None
        """Where a run that resumes goes on."""
        self._reads_alone = self.is_lane_aware and cut.window_steps == 1
        self._epoch = -1
        self._feeds: dict[int, _Feed] = {}
        self._num_read: dict[int, int] = {}

    def anew(self, lanes: range) -> "StreamReader":
        """Return a reader of these lanes that begins anew."""
        name = self.eval_dataset
        return StreamReader(self.dataset, self.collate, self.seed, self.cut, lanes, eval_dataset=name)

    def of_samples(self, stream: Stream) -> "StreamReader":
        """Return a reader of single samples of a stream, in all lanes of the run."""
        num_lanes, name = self.cut.num_lanes, self.eval_dataset
        cut = StreamCut(num_lanes, 1, 1)
        return StreamReader(stream, list, self.seed, cut, range(num_lanes), eval_dataset=name)

    def streams(self) -> Iterator["StreamReader"]:
        """See `SourceReader`."""
        return map(self.of_samples, _parts(self.dataset))

    def close(self) -> None:
        """Close what is open: the next micro-batch of a lane is that of the begin, or of `start`."""
        self._epoch, self._feeds, self._num_read = -1, {}, {}

    def __getitem__(self, index: tuple[int, int]) -> LaneBatch:
        """Read and collate the next micro-batch of a lane."""
        epoch, lane = index
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as DataLoader workers do, so that `num_workers` changes no sample
        try:
            if epoch != self._epoch:
                self._epoch, self._feeds, self._num_read = epoch, {}, {}
            with _no_worker():
                read = self._feed(lane).next(lane)
            number = self._num_read[lane]
            self._num_read[lane] += 1
            numbers = () if read is None else read.numbers
            first = number * self.cut.micro_batch_size
            turn = LaneTurn(epoch, number, lane, range(first, first + len(numbers)), (), is_last=False)
            batch = LaneBatch(turn, numbers, None, len(numbers), 0, self.eval_dataset)
            if read is not None:
                batch.state = read.state
                if not self._reads_alone:
                    place = epoch, number, lane
                    set_random_state(read_seed(self.seed, self.number, self.eval_dataset, *place))
                batch.data = self.collate(read.samples)
                if batch.data is None:
                    raise no_batch(self.collate)
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
            alone = range(lane, lane + 1)
            lanes, own = (alone, alone) if self.is_lane_aware else (range(self.cut.num_lanes), self.lanes)

            def seed(window: int, of_lane: int, what: str) -> int:
                name, number = self.eval_dataset, self.number
                return stream_seed(self.seed, number, name, epoch, window, of_lane, what)

            self._feeds[key] = _Feed(self._opener(epoch, lane), lanes, own, self.cut, seed, start)
        return self._feeds[key]

    def _opener(self, epoch: int, lane: int) -> Callable[[], Iterable[Any]]:
        """Return a function that opens what a lane is read from."""
        of_lane = (lane, self.cut.num_lanes) if self.is_lane_aware else (0, 1)
        return lambda: _checked(self._stream.iter_lane(epoch, *of_lane), self.dataset)


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


def _checked(samples: object, dataset: object) -> Iterable[Any]:
    if isinstance(samples, Iterable):
        return samples
    raise DataError(
        f"{type(dataset).__name__}.iter_lane must return the samples of the lane: got a "
        f"{type(samples).__name__}. Yield them, or return an iterable."
    )
