"""Which sides stay warm beside each other."""

import time
from dataclasses import dataclass, replace

import pytest

from lanewise.commands.bench import bench
from lanewise.commands.bench.modes import Mode
from lanewise.commands.bench.row import BenchRow
from lanewise.errors import ConfigError
from tests.distributed.tasks import Smooth, configure
from tests.unit.commands.bench.measured import first, turn

MODES = [Mode("ddp", count, "close") for count in (2, 3, 4, 5)]
GIB = 2**30


@dataclass
class Machine:
    """A machine of so much memory, of which each side takes one GiB; it notes what happens."""

    memory: int
    events: list[str]
    num_warm: int = 0

    def start(self, row, _jobs):
        if row.mode.num_devices == 3:
            row.failure = "why"
            return None
        before = self.memory - self.num_warm * GIB
        self.num_warm += 1
        self.events.append(f"start {row.mode.num_devices}")
        row.firsts = [replace(first(), free_bytes=(before, before - GIB))]
        return FakeSide(self, row.mode.num_devices, row.firsts)


@dataclass
class FakeSide:
    machine: Machine
    number: int
    firsts: list

    def take_turn(self):
        self.machine.events.append(f"turn {self.number}")
        return [turn(1.0)]

    def dismiss(self):
        self.machine.events.append(f"dismiss {self.number}")

    def close(self):
        self.machine.num_warm -= 1


def measured_on(monkeypatch, memory: int) -> tuple[list[str], dict[Mode, BenchRow]]:
    machine = Machine(memory, [])
    monkeypatch.setattr(bench, "start", machine.start)
    rows = {mode: BenchRow(mode) for mode in MODES}
    bench._measure(rows, lambda _: configure(Smooth), time.monotonic(), lambda _: None)
    assert machine.num_warm == 0
    return machine.events, rows


def test_all_take_turns_where_they_have_room(monkeypatch):
    events, rows = measured_on(monkeypatch, 100 * GIB)
    assert events[:5] == ["start 2", "start 4", "start 5", "turn 2", "turn 4"]
    assert events[-3:] == ["dismiss 2", "dismiss 4", "dismiss 5"]
    assert [len(row.rounds) for row in rows.values()] == [5, 0, 5, 5]
    assert rows[MODES[1]].failure == "why"


def test_groups_follow_each_other_where_they_have_none(monkeypatch):
    """After two sides two GiB are left, which is no more than twice what one takes."""
    events, rows = measured_on(monkeypatch, 4 * GIB)
    assert events[:4] == ["start 2", "start 4", "turn 2", "turn 4"]
    assert events[12:15] == ["dismiss 2", "dismiss 4", "start 5"]
    assert [len(row.rounds) for row in rows.values()] == [5, 0, 5, 5]


def test_a_class_that_is_not_there_is_one_error_before_anything_starts():
    config = configure("tests.distributed.tasks.Smoth")
    with pytest.raises(ConfigError, match="Smoth"):
        bench.bench(lambda _: config, (1, 2), ("single", "ddp"), seconds=1)
