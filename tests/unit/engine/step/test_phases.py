"""What the time of a step goes to, under a phases that the test winds."""

import itertools
import math
import time

import pytest
import torch

from lanewise.engine.step.phases import PHASES, Phases, StepTimes

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def run(phases: Phases, now: list[float], *laps: tuple[str, float]) -> None:
    for phase, seconds in laps:
        phases.begin(phase, step=0)
        now[0] += seconds
    phases.begin("callback", step=0)


def seconds(**phases: float) -> dict[str, float]:
    return {phase: phases.get(phase, 0.0) for phase in PHASES}


def test_every_phase_has_the_time_up_to_its_laps(now):
    phases = Phases(CPU)
    run(phases, now, ("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("data", 0.5), ("forward", 8.0))
    run(phases, now, ("backward", 16.0), ("communication", 32.0), ("optimizer", 64.0))
    spent = phases.take()().phases
    assert spent == seconds(data=1.5, forward=10.0, backward=20.0, communication=32.0, optimizer=64.0)
    assert list(spent) == list(PHASES)
    assert sum(spent.values()) == now[0] - 1000


def test_nothing_was_spent_where_no_lap_ended(now):
    assert Phases(CPU).take()().phases == seconds()


def test_what_was_taken_begins_anew(now):
    phases = Phases(CPU)
    run(phases, now, ("data", 1.0))
    first = phases.take()
    run(phases, now, ("data", 2.0), ("forward", 4.0))
    second = phases.take()
    assert first().phases == first().phases == seconds(data=1.0)
    assert second().phases == seconds(data=2.0, forward=4.0)


def test_what_is_skipped_belongs_to_no_phase_and_the_time_before_is_kept(now):
    phases = Phases(CPU)
    run(phases, now, ("data", 1.0))
    now[0] += 100
    run(phases, now, ("data", 2.0), ("optimizer", 4.0))
    assert phases.take()().phases == seconds(data=3.0, optimizer=4.0)
    assert phases.take()().phases == seconds()


def test_many_laps_are_added_up_so_that_they_take_no_memory(now):
    phases = Phases(CPU)
    for _ in range(5000):
        run(phases, now, ("data", 1.0), ("forward", 2.0))
    assert len(phases._laps) < 1500
    assert phases.take()().phases == seconds(data=5000.0, forward=10000.0)
    assert phases.take()().phases == seconds()


@pytest.mark.parametrize("begin_anew", [Phases.take, Phases.forget])
def test_what_lies_between_two_steps_belongs_to_neither(now, begin_anew):
    phases = Phases(CPU)
    run(phases, now, ("data", 1.0))
    now[0] += 100
    begin_anew(phases)
    run(phases, now, ("forward", 2.0))
    assert phases.take()().phases == seconds(forward=2.0)


def step(phases: Phases, now: list[float], computing: float, waiting: float) -> None:
    run(phases, now, ("data", computing / 2), ("communication", waiting), ("optimizer", computing / 2))


def test_each_step_has_its_time(now):
    phases = Phases(CPU)
    for computing in (1.0, 4.0, 2.0):
        step(phases, now, computing, waiting=8.0)
        now[0] += 100  # an evaluation
    times = phases.take()()
    assert times.steps == [9.0, 12.0, 10.0]
    assert times.phases == seconds(data=3.5, communication=24.0, optimizer=3.5)


@pytest.mark.parametrize(
    ("num_steps", "percent", "expected"),
    [(1, 50, 1), (1, 95, 1), (10, 50, 5), (10, 95, 10), (20, 95, 19), (100, 95, 95), (101, 95, 96)],
)
def test_percentiles(num_steps, percent, expected):
    steps = [float(number) for number in range(num_steps, 0, -1)]
    assert StepTimes(steps=steps).percentile(percent) == expected


def test_without_a_step_there_is_no_percentile():
    assert math.isnan(StepTimes().percentile(50))


def test_what_a_process_computed_is_that_of_whole_steps_without_waiting_for_others(now):
    phases = Phases(CPU)
    assert math.isnan(phases.computed_seconds())
    step(phases, now, 1.0, waiting=50.0)
    phases.take()()
    for computing in (2.0, 6.0):
        step(phases, now, computing, waiting=50.0)
    run(phases, now, ("data", 1000.0))  # of a step that has not ended
    assert phases.computed_seconds() == phases.computed_seconds() == 3.0
    read = phases.take()
    assert read().steps == [52.0, 56.0, 1000.0]
    assert phases.computed_seconds() == 1000.0


class Event:
    """A moment of a device, which has come to all of them up to a number."""

    reached = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        return self.number <= Event.reached

    def synchronize(self) -> None:
        assert self.query(), "it would wait for the device"

    def elapsed_time(self, end: "Event") -> float:
        return (end.number - self.number) * 1e3


def test_only_steps_that_the_device_has_completed_are_added_up(monkeypatch):
    phases = Phases(CPU)
    numbers = itertools.count()
    monkeypatch.setattr(phases, "_now", lambda: Event(next(numbers)))
    monkeypatch.setattr(Event, "reached", 3)
    phases.forget()
    for _ in range(3):  # a step is 3 moments
        for phase in ("data", "optimizer", "callback"):
            phases.begin(phase, step=0)
    assert math.isnan(phases.computed_seconds())
    monkeypatch.setattr(Event, "reached", 8)
    assert phases.computed_seconds() == 2.0
    read = phases.take()
    monkeypatch.setattr(Event, "reached", 10)
    assert read().steps == [2.0, 2.0, 2.0]
