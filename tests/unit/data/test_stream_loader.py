"""Lanes of a stream end at any time: each sample comes once, and its step depends on no process."""

import math
import weakref
from collections import Counter
from functools import partial
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.data import StreamCut, StreamLoader, StreamReader, is_stream
from lanewise.errors import CheckpointError, DataError, TaskError
from tests.unit.data.streams import Lengths, LengthsWithState, Numbers, NumbersWithState, read

patterns = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


@given(patterns, st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 5]))
@settings(deadline=None, max_examples=40)
def test_lanes_that_end_unevenly_give_each_sample_once_on_any_number_of_processes(
    lengths, world_size, micro_batch_size, shuffle_buffer
):
    options = {"micro_batch_size": micro_batch_size, "shuffle_buffer": shuffle_buffer}
    steps, _ = read(partial(Lengths, *lengths), world_size, **options)
    assert steps == read(partial(Lengths, *lengths), 1, **options)[0]
    assert len(steps) == 2 * math.ceil(max(lengths) / micro_batch_size)
    counts = Counter(sample[:3] for step in steps for samples in step.values() for sample in samples)
    due = ((e, lane, n) for e in range(2) for lane in range(4) for n in range(lengths[lane]))
    assert counts == dict.fromkeys(due, 1)
    for step in steps:
        for lane, samples in step.items():
            assert {sample[1] for sample in samples} == {lane}


@given(st.integers(1, 30), st.integers(1, 4), st.sampled_from([0, 5]))
@settings(deadline=None, max_examples=25)
def test_a_plain_stream_is_dealt_to_steps_and_lanes_in_its_order(size, world_size, shuffle_buffer):
    steps, _ = read(partial(Numbers, size), world_size, shuffle_buffer=shuffle_buffer)
    assert steps == read(partial(Numbers, size), 1, shuffle_buffer=shuffle_buffer)[0]
    assert len(steps) == 2 * math.ceil(size / 8)
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        numbers = [sample[0] for step in epoch for samples in step.values() for sample in samples]
        assert sorted(numbers) == list(range(size))
        if not shuffle_buffer:
            assert numbers == list(range(size))


@given(
    patterns,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 12),
    st.sampled_from([0, 4]),
    st.sampled_from([Lengths, LengthsWithState, Numbers, NumbersWithState]),
)
@settings(deadline=None, max_examples=60)
def test_a_run_that_resumes_on_another_number_of_processes_reads_the_rest(
    lengths, before, after, num_steps, shuffle_buffer, kind
):
    sizes = lengths if issubclass(kind, Lengths) else [sum(lengths)]
    make, options = partial(kind, *sizes), {"shuffle_buffer": shuffle_buffer}
    whole, _ = read(make, 1, **options)
    first, state = read(make, before, num_steps=num_steps, **options)
    rest, _ = read(make, after, state=state, **options)
    assert first + rest == whole


@pytest.mark.parametrize("stream", [Lengths(5, 0, 3, 1), Numbers(19)])
def test_the_samples_of_each_lane_are_known_in_their_step(stream):
    """By number, as errors have them, from what all processes know; in the second epoch again from 0."""
    cut = StreamCut(4, 2, 1)
    loader = StreamLoader(StreamReader(stream, list, 0, cut, range(4)), lambda own: [own], 2)
    num_batches = 0
    for batch in loader.batches(0, None):
        assert list(loader.samples_of(batch.turn.step, batch.turn.lane)) == list(batch.indices)
        num_batches += 1
        if batch.turn.is_last:
            batch.to_source.receive(batch.to_source.numbers)
        if loader.is_over:
            break
    assert num_batches == 2 * (6 if isinstance(stream, Lengths) else 10)


def test_a_batch_that_is_kept_does_not_keep_its_loader():
    """In a cycle with its batches a loader was collected late, and each of its workers took five seconds."""
    cut = StreamCut(4, 2, 1)
    loader = StreamLoader(StreamReader(Lengths(3, 3, 3, 3), list, 0, cut, range(4)), lambda own: [own], 1)
    kept = list(islice(loader.batches(0, None), 4))
    assert kept[-1].to_source is not None
    seen = weakref.ref(loader)
    del loader
    assert seen() is None


def test_a_lane_that_is_far_longer_than_the_others():
    steps, _ = read(partial(Lengths, 3, 300, 2, 0), 3, num_epochs=1)
    assert len(steps) == 150
    assert [list(step) for step in steps[:3]] == [[0, 1, 2], [0, 1], [1]]


@pytest.mark.parametrize("shuffle_buffer", [0, 4])
def test_loader_workers_change_nothing(shuffle_buffer):
    options = {"shuffle_buffer": shuffle_buffer, "num_epochs": 3}
    for make in (partial(Lengths, 5, 0, 9, 2), partial(Numbers, 21)):
        alone, _ = read(make, 1, **options)
        assert read(make, 1, num_workers=2, **options)[0] == alone


def test_a_lane_is_opened_once_an_epoch_and_by_its_own_process_only():
    streams: list[Lengths] = []

    def make() -> Lengths:
        streams.append(Lengths(5, 4, 3, 2))
        return streams[-1]

    read(make, 2)
    opened = sorted(sorted(stream.opened) for stream in streams)
    assert opened == [[(epoch, lane) for epoch in range(2) for lane in lanes] for lanes in ((0, 1), (2, 3))]


def test_drop_last_leaves_out_the_steps_that_some_lane_cannot_fill():
    steps, _ = read(partial(Lengths, 9, 5, 7, 6), 2, drop_last=True)
    assert [list(map(len, step.values())) for step in steps] == [[2, 2, 2, 2]] * 4
    assert [step[0][0][:3] for step in steps] == [(0, 0, 0), (0, 0, 2), (1, 0, 0), (1, 0, 2)]


@pytest.mark.parametrize(("lengths", "drop_last"), [((0, 0, 0, 0), False), ((9, 1, 9, 9), True)])
def test_a_stream_without_a_whole_step_is_an_error(lengths, drop_last):
    with pytest.raises(DataError, match=r"^the stream is too small for one step in epoch 1: the lanes have"):
        read(partial(Lengths, *lengths), 2, drop_last=drop_last)


def test_a_resumed_stream_with_a_state_reads_nothing_twice():
    streams: list[LengthsWithState] = []

    def make() -> LengthsWithState:
        streams.append(LengthsWithState(20, 20, 20, 20))
        return streams[-1]

    _, state = read(make, 1, num_steps=8, num_epochs=1)
    rest, _ = read(make, 1, state=state, num_epochs=1)
    assert len(rest) == 2
    assert [cursor.num_read for cursor in streams[-1].cursors] == [4] * 4


def test_a_stream_that_yields_other_samples_the_second_time_is_an_error():
    _, state = read(partial(Lengths, 8, 8, 8, 8), 1, num_steps=3)
    with pytest.raises(DataError, match=r"and had \[2, 2, 2, 2\] when the checkpoint was saved") as error:
        read(partial(Lengths, 8, 8, 7, 8), 2, state=state)
    assert "[2, 2, 1, 2] of them in step 4" in str(error.value)


def test_a_collate_that_returns_nothing_is_an_error():
    reader = StreamReader(Lengths(8, 8), lambda _: None, 7, StreamCut.of(2, 2, 0), range(2))
    with pytest.raises(TaskError, match="must return a micro-batch: got None"):
        reader[0, 0]


def test_a_state_of_other_lanes_is_refused():
    _, state = read(partial(Lengths, 8, 8, 8, 8), 1, num_steps=1)
    cut = StreamCut.of(2, 2, 0)
    loader = StreamLoader(StreamReader(Lengths(8, 8), list, 7, cut, range(2)), lambda value: [value])
    with pytest.raises(CheckpointError, match="was cut into 4 lanes, micro-batches of 2 and windows of 1"):
        loader.load_state_dict(state)


def test_a_step_that_the_stream_is_not_at_cannot_be_begun_with():
    reader = StreamReader(Lengths(8, 8), list, 7, StreamCut.of(2, 2, 0), range(2))
    loader = StreamLoader(reader, lambda value: [value])
    with pytest.raises(DataError, match="continues with step 1, and step 6 was asked for"):
        next(loader.batches(5, None))


def test_an_error_of_the_stream_names_its_lane():
    class Broken(Lengths):
        def iter_lane(self, epoch, lane, num_lanes):
            yield from super().iter_lane(epoch, lane, num_lanes)
            raise OSError("the line is dead")

    with pytest.raises(OSError, match="the line is dead") as error:
        read(partial(Broken, 3, 5, 5, 5), 1)
    assert "in lane 0 of the stream, epoch 1" in error.value.__notes__


def test_a_lane_that_is_not_iterable_is_an_error():
    class Nothing(Lengths):
        def iter_lane(self, epoch, lane, num_lanes):
            return None

    with pytest.raises(
        DataError, match=r"^Nothing.iter_lane must return the samples of the lane: got a NoneType"
    ):
        read(partial(Nothing, 3, 3, 3, 3), 1)


def test_an_iterator_is_no_stream():
    assert is_stream(Lengths(1))
    assert is_stream(Numbers(1))
    assert not is_stream([1])
    assert not is_stream({1: 2})
    with pytest.raises(TaskError, match=r"is a generator, an iterator, which can be read only once"):
        is_stream(number for number in range(3))


def test_a_further_pass_over_the_lanes_of_a_step_is_no_step():
    """As of an own loop with two models, or of an optimizer with a closure."""
    reader = StreamReader(Lengths(8), list, 7, StreamCut.of(1, 2, 0), range(1))
    loader = StreamLoader(reader, lambda value: [value])
    batches = loader.batches(0, None)
    for step in range(2):
        to_source = next(batches).to_source
        for _ in range(2):
            to_source.receive(to_source.numbers)
        assert loader.num_samples_after(step) == 2 * (step + 1)
