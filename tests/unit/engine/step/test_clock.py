"""What the time of a step goes to, under a clock that the test winds."""

import time

import pytest
import torch

from lanewise.engine.step.clock import PHASES, StepClock

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def run(clock: StepClock, now: list[float], *laps: tuple[str, float]) -> None:
    for phase, seconds in laps:
        now[0] += seconds
        clock.lap(phase, begins="data")


def seconds(**phases: float) -> dict[str, float]:
    return {phase: phases.get(phase, 0.0) for phase in PHASES}


def test_every_phase_has_the_time_up_to_its_laps(now):
    clock = StepClock(CPU)
    run(clock, now, ("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("data", 0.5), ("forward", 8.0))
    run(clock, now, ("backward", 16.0), ("communication", 32.0), ("optimizer", 64.0))
    spent = clock.take()()
    assert spent == seconds(data=1.5, forward=10.0, backward=20.0, communication=32.0, optimizer=64.0)
    assert list(spent) == list(PHASES)
    assert sum(spent.values()) == now[0] - 1000


def test_nothing_was_spent_where_no_lap_ended(now):
    assert StepClock(CPU).take()() == seconds()


def test_what_was_taken_begins_anew(now):
    clock = StepClock(CPU)
    run(clock, now, ("data", 1.0))
    first = clock.take()
    run(clock, now, ("data", 2.0), ("forward", 4.0))
    second = clock.take()
    assert first() == first() == seconds(data=1.0)
    assert second() == seconds(data=2.0, forward=4.0)


def test_what_is_skipped_belongs_to_no_phase_and_the_time_before_is_kept(now):
    clock = StepClock(CPU)
    run(clock, now, ("data", 1.0))
    now[0] += 100
    clock.skip()
    run(clock, now, ("data", 2.0), ("optimizer", 4.0))
    assert clock.take()() == seconds(data=3.0, optimizer=4.0)
    assert clock.take()() == seconds()


def test_many_laps_are_added_up_so_that_they_take_no_memory(now):
    clock = StepClock(CPU)
    for _ in range(5000):
        clock.skip()
        run(clock, now, ("data", 1.0), ("forward", 2.0))
    assert len(clock._laps) < 1500
    assert clock.take()() == seconds(data=5000.0, forward=10000.0)
    assert clock.take()() == seconds()


@pytest.mark.parametrize("begin_anew", [StepClock.take, StepClock.begin])
def test_what_lies_between_two_steps_belongs_to_neither(now, begin_anew):
    clock = StepClock(CPU)
    run(clock, now, ("data", 1.0))
    now[0] += 100
    begin_anew(clock)
    run(clock, now, ("forward", 2.0))
    assert clock.take()() == seconds(forward=2.0)
