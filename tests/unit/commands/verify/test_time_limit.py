"""Probes try as often on a slow machine as on a quick one, within a limit that they tell of."""

import itertools
import time

from lanewise.commands.verify.time_limit import in_time


def test_a_slow_machine_tries_as_often(monkeypatch):
    """It tried for a second at most, so it saw less where each try took longer."""
    monkeypatch.setattr(time, "monotonic", itertools.count(step=0.5).__next__)
    cut_short: list[str] = []
    assert list(in_time(range(16), cut_short, "samples")) == [*range(16)]
    assert cut_short == []


def test_tries_that_were_left_out_are_told_of(monkeypatch):
    monkeypatch.setattr(time, "monotonic", itertools.count(step=20.0).__next__)
    cut_short: list[str] = []
    assert list(in_time(range(16), cut_short, "samples")) == [0]
    assert cut_short == ["samples: 1 were looked at within 10 s, and no more of them."]
    assert list(in_time(range(1), cut_short, "one sample")) == [0]
    assert len(cut_short) == 1
