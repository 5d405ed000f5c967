"""Which positions each lane reads in which step, and what a process does in a step."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.lanes import LaneTurn, Schedule, SequentialSchedule, lane_ranges


def table(schedule: Schedule) -> list[list[list[int]]]:
    """The first epoch as [step][lane][position]."""
    return [
        [list(schedule.positions(step, lane)) for lane in range(schedule.num_lanes)]
        for step in range(schedule.steps_per_epoch)
    ]


def test_twenty_samples_on_four_lanes_as_drawn():
    assert table(Schedule(num_samples=20, global_batch_size=8, micro_batch_size=2)) == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10, 11], [12, 13], [14, 15]],
        [[16, 17], [18, 19], [], []],
    ]


def test_without_the_partial_step():
    assert table(Schedule(20, 8, 2, drop_last=True)) == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10, 11], [12, 13], [14, 15]],
    ]


def test_a_partial_step_is_shared_out_evenly():
    assert table(Schedule(num_samples=9, global_batch_size=16, micro_batch_size=4)) == [
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], []],
    ]


def test_the_first_lanes_of_a_partial_step_have_one_more():
    assert table(Schedule(num_samples=10, global_batch_size=16, micro_batch_size=4)) == [
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], []],
    ]


def test_every_epoch_has_the_positions_of_the_first():
    schedule = Schedule(20, 8, 2)
    for step in range(3):
        for lane in range(4):
            assert schedule.positions(step + 300, lane) == schedule.positions(step, lane)


def turn(step: int, lane: int, start: int, stop: int, num_present_lanes: int, *, is_last: bool) -> LaneTurn:
    return LaneTurn(step // 3, step, lane, range(start, stop), range(num_present_lanes), is_last)


def test_the_turns_of_two_processes():
    schedule = Schedule(20, 8, 2)
    assert list(schedule.turns(range(2), 1, 4)) == [
        turn(1, 0, 8, 10, 4, is_last=False),
        turn(1, 1, 10, 12, 4, is_last=True),
        turn(2, 0, 16, 18, 2, is_last=False),
        turn(2, 1, 18, 20, 2, is_last=True),
        turn(3, 0, 0, 2, 4, is_last=False),
        turn(3, 1, 2, 4, 4, is_last=True),
    ]
    assert list(schedule.turns(range(2, 4), 1, 4)) == [
        turn(1, 2, 12, 14, 4, is_last=False),
        turn(1, 3, 14, 16, 4, is_last=True),
        turn(2, 2, 0, 0, 2, is_last=True),  # all its lanes are absent, and yet it takes part
        turn(3, 2, 4, 6, 4, is_last=False),
        turn(3, 3, 6, 8, 4, is_last=True),
    ]


@st.composite
def runs(draw):
    num_lanes = draw(st.integers(1, 12))
    micro_batch_size = draw(st.integers(1, 9))
    schedule = Schedule(
        num_samples=draw(st.integers(0, 500)),
        global_batch_size=num_lanes * micro_batch_size,
        micro_batch_size=micro_batch_size,
        drop_last=draw(st.booleans()),
    )
    return schedule, draw(st.integers(1, num_lanes)), draw(st.integers(1, 3))


def turns_by_step(schedule: Schedule, world_size: int, epochs: int) -> list[list[list[LaneTurn]]]:
    """The turns of all processes, as [step][rank][turn]."""
    steps = schedule.steps_per_epoch * epochs
    by_step: list[list[list[LaneTurn]]] = [[[] for _ in range(world_size)] for _ in range(steps)]
    for rank, lanes in enumerate(lane_ranges(schedule.num_lanes, world_size)):
        for turn in schedule.turns(lanes, 0, steps):
            assert turn.lane in lanes
            by_step[turn.step][rank].append(turn)
    return by_step


@settings(deadline=None)
@given(runs())
def test_all_processes_together_read_every_position_once_an_epoch(run):
    schedule, world_size, epochs = run
    seen = Counter(
        (turn.epoch, position)
        for ranks in turns_by_step(schedule, world_size, epochs)
        for turns in ranks
        for turn in turns
        for position in turn.positions
    )
    read = schedule.num_samples
    if schedule.drop_last:
        read -= read % schedule.global_batch_size
    expected = {(epoch, position): 1 for epoch in range(epochs) for position in range(read)}
    assert seen == expected


@settings(deadline=None)
@given(runs())
def test_every_process_takes_part_in_every_step(run):
    schedule, world_size, epochs = run
    ranges = lane_ranges(schedule.num_lanes, world_size)
    for step, ranks in enumerate(turns_by_step(schedule, world_size, epochs)):
        present = {turn.lane for turns in ranks for turn in turns if turn.positions}
        assert present == set(range(len(present)))
        assert schedule.num_present_lanes(step) == len(present)
        for lanes, turns in zip(ranges, ranks, strict=True):
            assert [turn.is_last for turn in turns] == [False] * (len(turns) - 1) + [True]
            assert {turn.epoch for turn in turns} == {step // schedule.steps_per_epoch}
            assert {turn.present for turn in turns} == {range(len(present))}
            if present.isdisjoint(lanes):
                assert [(turn.lane, len(turn.positions)) for turn in turns] == [(lanes.start, 0)]
            else:
                assert [turn.lane for turn in turns] == [lane for lane in lanes if lane in present]


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5), st.data())
def test_a_sequential_schedule_reads_everything_once_and_every_process_takes_part(
    num_samples, num_lanes, size, data
):
    schedule = SequentialSchedule(num_samples, num_lanes, size)
    read: list[int] = []
    for lanes in lane_ranges(num_lanes, data.draw(st.integers(1, num_lanes))):
        turns = list(schedule.turns(lanes))
        own = [position for turn in turns for position in turn.positions]
        assert [bool(turn.positions) for turn in turns] == ([True] * len(turns) if own else [False])
        read += own
    assert read == list(range(num_samples))


@settings(deadline=None)
@given(runs())
def test_a_step_is_as_full_and_as_even_as_its_samples_allow(run):
    schedule, world_size, epochs = run
    full = schedule.num_samples // schedule.global_batch_size
    for step, ranks in enumerate(turns_by_step(schedule, world_size, epochs)):
        sizes = [len(turn.positions) for turns in ranks for turn in turns if turn.positions]
        assert sum(sizes) == schedule.num_samples_in(step)
        assert len(sizes) == -(-sum(sizes) // schedule.micro_batch_size)
        assert max(sizes) <= schedule.micro_batch_size
        assert max(sizes) - min(sizes) <= 1
        if step % schedule.steps_per_epoch < full:
            assert sizes == [schedule.micro_batch_size] * schedule.num_lanes
        else:
            assert not schedule.drop_last


@settings(deadline=None)
@given(runs())
def test_a_lane_reads_the_same_whoever_carries_it(run):
    schedule, world_size, epochs = run
    for ranks in turns_by_step(schedule, world_size, epochs):
        for turn in (turn for turns in ranks for turn in turns):
            assert turn.positions == schedule.positions(turn.step, turn.lane)


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "steps"),
    [(0, False, 0), (0, True, 0), (1, False, 1), (7, True, 0), (8, False, 1), (8, True, 1), (9, False, 2)],
)
def test_steps_of_an_epoch(num_samples, drop_last, steps):
    assert Schedule(num_samples, 8, 2, drop_last).steps_per_epoch == steps


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size"), [(8, 3), (8, 0), (8, -2), (0, 2), (-4, 2)]
)
def test_batch_sizes_that_do_not_fit_are_refused(global_batch_size, micro_batch_size):
    with pytest.raises(ValueError, match=f"got {global_batch_size} and {micro_batch_size}"):
        Schedule(20, global_batch_size, micro_batch_size)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_samples_before_a_step_are_those_of_the_steps_before_it(drop_last):
    schedule = Schedule(num_samples=21, global_batch_size=8, micro_batch_size=2, drop_last=drop_last)
    for step in range(3 * schedule.steps_per_epoch + 1):
        assert schedule.num_samples_before(step) == sum(map(schedule.num_samples_in, range(step)))
