"""What counts as a stream, and how a lane is had of each kind of them."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker

from lanewise.data import MixedStream, StreamCut, StreamReader, draws_in_threads, is_stream, shuffles_itself
from lanewise.data.lane_stream import OpenStream, as_lane_stream, shards_of
from lanewise.errors import DataError, TaskError


class Stateful:
    """Knows where it is; a state that was loaded shows only after the next sample, as in `datasets`."""

    def __init__(self) -> None:
        self.begin = 0
        self.now = 0

    def __iter__(self) -> Iterator[int]:
        for now in range(self.begin + 1, 9):
            self.now = now
            yield now

    def state_dict(self) -> dict[str, int]:
        return {"now": self.now}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["now"]


class Parts:
    """Yields a part of its samples in each loader worker."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        info = get_worker_info()
        yield from range(8) if info is None else range(info.id, 8, info.num_workers)


def stream_of(num_shards: int = 4, rows: int = 3) -> Any:
    """A stream of Hugging Face: shard k has the numbers from 10 * k on."""
    datasets = pytest.importorskip("datasets")

    def generate(shards: list[int]) -> Iterator[Any]:
        for shard in shards:
            yield from ({"number": 10 * shard + row} for row in range(rows))

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [*range(num_shards)]})


def numbers(rows: Any) -> list[int]:
    return [row["number"] for row in rows]


@pytest.mark.parametrize("name", ["WebDataset", "WebLoader", "DataPipeline"])
def test_what_webdataset_reads_itself_is_refused_with_the_line_to_type(name):
    """By the rank it gave each number of processes other samples, or ended with a word of its own."""
    kind = type(
        name, (IterableDataset,), {"__module__": "webdataset.compat", "__iter__": lambda _: iter([1])}
    )
    for dataset in (kind(), type("Own", (kind,), {})()):
        for look in (is_stream, as_lane_stream, lambda stream: MixedStream([stream], [1])):
            with pytest.raises(
                TaskError, match=r"of webdataset.* WebDataset\(urls\[lane::num_lanes\], .*nodesplitter=iter\)"
            ):
                look(dataset)
    own = type("Lanes", (kind,), {"iter_lane": lambda self, *_: self})()
    assert as_lane_stream(own) is own


def test_what_is_a_stream():
    assert is_stream(Parts())
    assert is_stream({1, 2})
    assert not is_stream([1, 2])
    assert not is_stream(TensorDataset(torch.zeros(3)))


@pytest.mark.parametrize(
    "make", [is_stream, as_lane_stream, lambda stream: MixedStream([stream, {1}], [1, 1])]
)
def test_what_makes_batches_or_is_read_only_once_is_an_error(make):
    with pytest.raises(TaskError, match=r"is a DataLoader, whose items are batches.*Return the dataset"):
        make(DataLoader(TensorDataset(torch.zeros(3)), batch_size=2))
    with pytest.raises(TaskError, match="is a generator, an iterator, which can be read only once"):
        make(number for number in range(3))


def test_a_dataset_of_hugging_face_that_is_streamed_is_one_and_another_is_not():
    datasets = pytest.importorskip("datasets")
    assert is_stream(stream_of())
    assert not is_stream(datasets.Dataset.from_dict({"number": [1]}))


def test_lanes_get_the_shards_of_a_dataset_of_hugging_face():
    lanes = as_lane_stream(stream_of())
    assert shards_of(lanes) == 4
    assert [sorted(numbers(lanes.iter_lane(3, lane, 2))) for lane in range(2)] == [
        [0, 1, 2, 10, 11, 12],
        [20, 21, 22, 30, 31, 32],
    ]


def test_a_state_of_hugging_face_goes_on_in_its_epoch_and_survives_that_it_is_saved_at_once():
    lanes = as_lane_stream(stream_of())
    for epoch in (0, 2):
        whole = numbers(lanes.iter_lane(epoch, 0, 2))
        for at in range(1, len(whole) + 1):
            opened = OpenStream(lanes.iter_lane(epoch, 0, 2))
            assert numbers(opened.take(at)) == whole[:at]
            after = OpenStream(lanes.iter_lane(epoch, 0, 2), opened.state)
            again = OpenStream(lanes.iter_lane(epoch, 0, 2), after.state)
            assert numbers(after.take(100)) == numbers(again.take(100)) == whole[at:]


def test_a_loaded_state_is_the_state_until_the_next_sample():
    opened = OpenStream(Stateful(), {"now": 4})
    assert opened.state == {"now": 4}
    assert opened.take(1) == [5]
    assert opened.state == {"now": 5}
    assert OpenStream(range(3)).state is None


def test_a_state_of_what_has_none_is_an_error():
    with pytest.raises(DataError, match="its range has no state_dict and load_state_dict now"):
        OpenStream(range(3), {"now": 4})


def test_a_shuffle_buffer_of_hugging_face_is_found_and_has_no_state():
    stream = stream_of()
    shuffled = stream.shuffle(seed=1, buffer_size=4).map(lambda row: row)
    assert not shuffles_itself(stream)
    assert shuffles_itself(shuffled)
    lanes = as_lane_stream(shuffled)
    opened = OpenStream(lanes.iter_lane(0, 0, 2))
    assert not opened.has_state
    assert numbers(opened.take(100)) == numbers(lanes.iter_lane(0, 0, 2))


def noisy(row: Any) -> Any:
    return {"number": row["number"] + int(torch.randint(9, ()))}


@pytest.mark.parametrize(
    ("make", "draws"),
    [
        (lambda: stream_of().map(noisy).shuffle(seed=1, buffer_size=4), True),
        (lambda: stream_of().filter(lambda _: random.random() < 0.5).shuffle(seed=1, buffer_size=4), True),
        (lambda: interleaved(stream_of().map(noisy), stream_of()), True),
        (lambda: MixedStream([{1}, stream_of().map(noisy).shuffle(seed=1, buffer_size=4)], [1, 1]), True),
        (lambda: stream_of().map(lambda row: row).shuffle(seed=1, buffer_size=4), False),
        (lambda: stream_of().shuffle(seed=1, buffer_size=4).map(noisy), False),
        (lambda: interleaved(stream_of(), stream_of()).map(noisy), False),
        (lambda: stream_of().map(noisy), False),
        (lambda: {1}, False),
    ],
)
def test_what_draws_in_threads_of_hugging_face_is_found(make, draws):
    stream = make()  # may draw: it resolves features
    before = torch.get_rng_state()
    assert draws_in_threads(stream) == draws
    assert torch.equal(torch.get_rng_state(), before)


def interleaved(*streams: Any) -> Any:
    return pytest.importorskip("datasets").interleave_datasets([*streams])


def reader_of(dataset: Any, num_lanes: int) -> StreamReader:
    return StreamReader(dataset, list, 0, StreamCut.of(num_lanes, 2, 0), range(num_lanes))


@pytest.mark.parametrize("make", [Parts, stream_of, lambda: stream_of().shuffle(seed=1, buffer_size=4)])
def test_a_stream_yields_the_same_in_loader_workers(make, monkeypatch):
    def read() -> list[Any]:
        reader = reader_of(make(), 2)
        return [reader[1, lane].data for _ in range(4) for lane in range(2)]

    alone = read()
    assert len(alone[4]) == 2
    monkeypatch.setattr(worker, "_worker_info", SimpleNamespace(id=1, num_workers=2, seed=0))
    assert read() == alone
    assert get_worker_info().id == 1


def test_fewer_shards_than_lanes_are_dealt_as_a_plain_stream():
    assert reader_of(stream_of(4), 4).is_lane_aware
    reader = reader_of(stream_of(3), 4)
    assert not reader.is_lane_aware
    assert [numbers(reader[0, lane].data) for lane in range(4)] == [[0, 1], [2, 10], [11, 12], [20, 21]]
