"""Streams, which have neither a length nor an index, and how the samples of a lane are had of any of them."""

from collections import deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from lanewise.errors import DataError, TaskError
from lanewise.processes.device.random_state import generator_states, kept_random_state, set_random_state


@runtime_checkable
class LaneStream(Protocol):
    """A stream that can read what belongs to a single lane, and nothing else.

    One that cannot be cut into any number of lanes has the attribute `num_shards`. Where there are more lanes
    than that, it is read as a plain stream is: each process reads `iter_lane(epoch, 0, 1)`, which is all of
    it, and keeps what belongs to its lanes.
    """

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        """Return the samples of a lane in an epoch, the same ones whenever it is called.

        Over all lanes each sample of the epoch comes once. Where the returned object, or its iterator, has
        `state_dict` and `load_state_dict`, a run that resumes goes on from its state. Otherwise it reads the
        lane from its beginning, and leaves out what was trained on.
        """
        ...


Stream: TypeAlias = LaneStream | Iterable[Any]

_THREADED = {
    "CyclingMultiSourcesExamplesIterable",
    "InterleavedShardsExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
}
"""What reads several sources with a thread for each: a shuffle buffer, and what interleaves datasets."""
_MANY = 8
"""Samples that show whether reading them draws."""


def is_stream(dataset: object) -> bool:
    """Tell whether a dataset is read as a stream, not by index.

    Raises:
        TaskError: if it can be iterated over only once, or makes batches itself.
    """
    _require_samples(dataset)
    if isinstance(dataset, IterableDataset | LaneStream) or _has_shards(dataset):
        return True
    return isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")


def as_lane_stream(stream: Stream) -> LaneStream:
    """Return a stream that can read a lane, of any stream; a plain one has a single shard.

    Raises:
        TaskError: as `is_stream`.
    """
    _require_samples(stream)
    if isinstance(stream, LaneStream):
        return stream
    return _Sharded(stream) if _has_shards(stream) else _Whole(stream)


def shards_of(stream: LaneStream) -> int | None:
    """Return into how many lanes a stream can be cut; None: any number."""
    num_shards: int | None = getattr(stream, "num_shards", None)
    return num_shards


def shuffles_itself(stream: object) -> bool:
    """Tell whether a dataset of Hugging Face has a shuffle buffer, of which its own state knows nothing."""
    return any(type(part).__name__ == "BufferShuffledExamplesIterable" for part in _made_of(stream))


def draws_in_threads(stream: object) -> bool:
    """Tell whether threads of a dataset of Hugging Face draw random numbers, as in a function of its `map`.

    Nobody sets the random state for them, and they share it. What they read is read here without them.
    """
    for part in _made_of(stream):
        if type(part).__name__ in _THREADED:
            for source in _inner(part):
                shard = source.shard_data_sources(max(1, source.num_shards), 0)  # its state is its own
                with kept_random_state():
                    set_random_state(0)
                    before = generator_states()
                    deque(islice(shard, _MANY), maxlen=0)
                    if generator_states() != before:
                        return True
    return False


def _made_of(stream: object) -> Iterator[Any]:
    """Yield a stream and what it is made of, if it is a dataset of Hugging Face or a mixture."""
    yield stream
    for part in _inner(stream):
        yield from _made_of(part)


def _inner(stream: object) -> list[Any]:
    parts = [getattr(stream, name, None) for name in ("_ex_iterable", "ex_iterable")]
    parts += [*getattr(stream, "ex_iterables", ()), *getattr(stream, "streams", ())]
    return [part for part in parts if part is not None]


def _require_samples(dataset: object) -> None:
    """Raise TaskError if it cannot give its samples whenever they are asked for."""
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"a dataset is a {name}, whose items are batches: each would count as one sample. Return the "
            "dataset that it loads, which is its attribute dataset. Its batch size, collate_fn and number of "
            "workers are batch, Task.collate and data.num_workers, or arguments of an own loop."
        )
    if hasattr(dataset, "__next__"):
        raise TaskError(
            f"a dataset is a {name}, an iterator, which can be read only once: every epoch, a run that "
            "resumes and verify begin anew. Return an IterableDataset whose __iter__ makes the iterator."
        )
    kinds = {kind.__module__.partition(".")[0] for kind in type(dataset).__mro__}
    if "webdataset" in kinds and not hasattr(dataset, "iter_lane"):
        raise TaskError(
            f"a dataset is a {name} of webdataset, which chooses samples by rank and worker. Return an "
            "object with num_shards = len(urls), whose iter_lane(self, epoch, lane, num_lanes) is: return "
            "WebDataset(urls[lane::num_lanes], shardshuffle=False, nodesplitter=iter) (docs/data.md)."
        )


def _has_shards(dataset: object) -> bool:
    """Tell whether it is a `datasets.IterableDataset`, or looks like one.

    That one has a `__getitem__`, for columns, and derives from torch's only if torch was imported before.
    """
    names = ("__iter__", "shard", "num_shards", "set_epoch")
    return not hasattr(dataset, "__len__") and all(hasattr(dataset, name) for name in names)


@final
@dataclass
class _Whole:
    """A plain stream."""

    dataset: Any
    num_shards = 1

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        """Return all samples of the epoch: there is one lane only."""
        assert (lane, num_lanes) == (0, 1)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        samples: Iterable[Any] = self.dataset
        return samples


@final
@dataclass
class _Sharded:
    """A `datasets.IterableDataset`, whose shards are given to lanes: the same ones in every epoch."""

    dataset: Any

    def __post_init__(self) -> None:
        self.num_shards: int = self.dataset.num_shards

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        """Return a dataset of the lane's shards; a new one, since a state that is loaded stays in it."""
        part: Any = self.dataset.shard(num_shards=num_lanes, index=lane)
        part.set_epoch(epoch)
        # Without a state the lane is read again from its beginning, which loses nothing.
        samples: Iterable[Any] = iter(part) if shuffles_itself(part) else part
        return samples


@final
class OpenStream:
    """An iteration over samples that have been opened, and its state.

    Args:
        samples: what was opened.
        state: where to go on, as `state` was there; None: at the beginning.

    Raises:
        DataError: if there is a state, and the samples have none.
    """

    def __init__(self, samples: Iterable[Any], state: Any = None) -> None:
        self._loaded = state
        self._holder: Any = None
        self._hold(samples)
        self._iterator = iter(samples)
        self._hold(self._iterator)
        if state is not None and self._holder is None:
            raise DataError(
                f"the checkpoint has a state of a stream, and its {type(samples).__name__} has no state_dict "
                "and load_state_dict now. Give it both again, or begin a new run."
            )

    def _hold(self, holder: object) -> None:
        """Let it have the state, unless something else has."""
        if self._holder is None and hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
            self._holder = holder
            if self._loaded is not None:
                holder.load_state_dict(self._loaded)

    @property
    def has_state(self) -> bool:
        """Whether it can go on from a state."""
        return self._holder is not None

    @property
    def state(self) -> Any:
        """Where it is; None if it has no state."""
        if self._loaded is not None:
            return self._loaded  # that of `datasets` is wrong between the loading and the next sample
        return None if self._holder is None else deepcopy(self._holder.state_dict())  # which may be its own

    def take(self, num_samples: int) -> list[Any]:
        """Return so many samples, fewer at the end."""
        self._loaded = None
        return list(islice(self._iterator, num_samples))
