"""Each lane of a stream is read one micro-batch ahead, and no further without workers."""

import multiprocessing

import pytest

from lanewise.data import StreamCut, StreamReader
from lanewise.data.stream_lanes import StreamLanes
from tests.unit.data.streams import LengthsWithState, Numbers


def open_lanes(stream, num_lanes: int, num_workers: int = 0, **options) -> StreamLanes:
    reader = StreamReader(stream, list, 0, StreamCut.of(num_lanes, 2, 0), range(num_lanes))
    lanes = StreamLanes(reader, num_workers, pin_memory=False, **options)
    lanes.open(0)
    return lanes


def test_a_lane_is_one_micro_batch_ahead_of_what_was_taken():
    stream = LengthsWithState(5, 4)
    lanes = open_lanes(stream, 2)
    assert not stream.cursors
    assert [lanes.num_next(lane) for lane in (0, 1, 0)] == [2, 2, 2]
    assert [cursor.num_read for cursor in stream.cursors] == [2, 2]
    assert [sample[:3] for sample in lanes.take(0).data] == [(0, 0, 0), (0, 0, 1)]
    assert [cursor.num_read for cursor in stream.cursors] == [4, 2]
    assert lanes.states() == {0: {"position": 2}}  # lane 1 is at its begin, which needs none
    lanes.take(0)
    assert (lanes.num_next(0), len(lanes.take(0).data), lanes.num_next(0)) == (1, 1, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_new_epoch_leaves_out_what_was_read_ahead(num_workers):
    lanes = open_lanes(LengthsWithState(9, 9, 9), 3, num_workers)
    assert lanes.num_next(1) == 2
    assert lanes.take(1).data[0][:2] == (0, 1)
    lanes.open(1)
    assert [lanes.num_next(lane) for lane in range(3)] == [2, 2, 2]
    assert [lanes.take(lane).data[0][:3] for lane in range(3)] == [(1, lane, 0) for lane in range(3)]


def test_a_lane_that_had_ended_where_a_run_goes_on_is_not_read():
    stream = LengthsWithState(9, 9)
    lanes = open_lanes(stream, 2)
    lanes.open(0, ended=[1])
    assert [lanes.num_next(lane) for lane in range(2)] == [2, 0]
    lanes.take(0)
    assert len(stream.cursors) == 1


@pytest.mark.parametrize(
    ("stream", "num_workers", "shares"),
    [
        (LengthsWithState(1, 1, 1), 2, [range(2), range(2, 3)]),
        (LengthsWithState(1, 1, 1), 5, [range(1), range(1, 2), range(2, 3)]),
        (LengthsWithState(1, 1, 1), 0, [range(3)]),
        (Numbers(9), 2, [range(3)]),
    ],
)
def test_a_lane_lives_in_one_worker_and_a_plain_stream_in_a_single_one(stream, num_workers, shares):
    assert open_lanes(stream, 3, num_workers).shares == shares


def test_workers_end_as_soon_as_nobody_refers_to_the_lanes():
    before = {*multiprocessing.active_children()}
    lanes = open_lanes(LengthsWithState(40, 40), 2, 2)
    assert lanes.num_next(1) == 2
    assert len({*multiprocessing.active_children()} - before) == 2
    del lanes
    assert {*multiprocessing.active_children()} <= before
