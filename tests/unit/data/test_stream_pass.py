"""A stream read once to its end: each lane's micro-batches in order, and the last one marked."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from lanewise.data import LaneBatch, StreamCut, StreamReader, read_first, read_to_end

SIZE = 2


class OfLanes:
    """Samples (lane, number)."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[tuple[int, int]]:
        return ((lane, number) for number in range(self.lengths[lane]))


class Plain(IterableDataset[int]):
    """The numbers below its length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def reader_of(stream: Any, num_lanes: int, lanes: range) -> StreamReader:
    return StreamReader(stream, list, 0, StreamCut.of(num_lanes, SIZE, 0), lanes, eval_dataset="held_out")


def by_lane(batches: Iterator[LaneBatch]) -> dict[int, list[Any]]:
    """The samples of each lane, whose micro-batches must be numbered in order, and the last one marked."""
    found: dict[int, list[Any]] = {}
    ended = set()
    for batch in batches:
        of_lane = found.setdefault(batch.turn.lane, [])
        assert batch.turn.lane not in ended
        assert batch.num_samples == len(batch.data) == len(batch.turn.positions) > 0
        assert (batch.turn.step * SIZE, batch.turn.positions.start) == (len(of_lane), len(of_lane))
        of_lane += batch.data
        if batch.turn.is_last:
            ended.add(batch.turn.lane)
    assert ended == set(found)
    return found


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), data=st.data())
def test_each_sample_of_a_lane_comes_once(lengths, data):
    start = data.draw(st.integers(0, len(lengths) - 1))
    lanes = range(start, data.draw(st.integers(start + 1, len(lengths))))
    reader = reader_of(OfLanes(lengths), len(lengths), lanes)
    expected = {lane: [(lane, number) for number in range(lengths[lane])] for lane in lanes if lengths[lane]}
    for _ in range(2):  # nothing is read through the reader itself
        assert by_lane(read_to_end(reader, 0)) == expected


@given(length=st.integers(0, 30), num_lanes=st.integers(1, 4), data=st.data())
def test_a_plain_stream_is_dealt_in_micro_batches(length, num_lanes, data):
    start = data.draw(st.integers(0, num_lanes - 1))
    lanes = range(start, data.draw(st.integers(start + 1, num_lanes)))
    expected: dict[int, list[int]] = {}
    for number in range(length):
        if (lane := number // SIZE % num_lanes) in lanes:
            expected.setdefault(lane, []).append(number)
    assert by_lane(read_to_end(reader_of(Plain(length), num_lanes, lanes), 0)) == expected


def test_a_lane_aware_stream_is_read_lane_after_lane():
    turns = [batch.turn for batch in read_to_end(reader_of(OfLanes([4, 3, 0, 5]), 4, range(4)), 0)]
    assert [(turn.lane, turn.step) for turn in turns] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (3, 0),
        (3, 1),
        (3, 2),
    ]


@pytest.mark.parametrize("stream", [OfLanes([7, 0, 3, 4]), Plain(19)])
def test_workers_read_the_same(stream):
    reader = reader_of(stream, 4, range(4))
    assert by_lane(read_to_end(reader, 2)) == by_lane(read_to_end(reader, 0))


def test_the_first_micro_batch_is_that_of_the_first_lane_that_has_one():
    first = read_first(reader_of(OfLanes([0, 0, 3, 1]), 4, range(4)))
    assert (first.turn.lane, first.data) == (2, [(2, 0), (2, 1)])
    assert read_first(reader_of(Plain(1), 4, range(3, 4))).data == [0]
    for nothing in (OfLanes([0, 0]), Plain(0)):
        assert read_first(reader_of(nothing, 2, range(2))).num_samples == 0
