"""Which host is at fault, by made-up figures."""

from itertools import permutations

import pytest

from lanewise.commands.doctor.judge import Clock, judge_clocks, judge_links
from lanewise.commands.doctor.measure import Equipment, Link

NAMES = ("a", "b", "c", "d")


def links(count: int, slow: dict[tuple[int, int], float]) -> list[Link]:
    """All ways between hosts, of 10 Gbit/s but for some."""
    ways = permutations(range(count), 2)
    return [Link(*way, slow.get(way, 10.0) * 1e9 / 8, 1e-4) for way in ways]


def named(count: int, slow: dict[tuple[int, int], float], **options: object) -> list[str]:
    return [one.host for one in judge_links(links(count, slow), NAMES[:count], **options)]


def clocks(*offsets: float, uncertainty: float = 0.01) -> dict[str, Clock]:
    return {name: Clock(offset, uncertainty) for name, offset in zip(NAMES, offsets, strict=False)}


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (clocks(0.0), []),
        (clocks(0.9, -0.9), []),
        (clocks(0.0, 3.0), ["b"]),
        (clocks(-3600.0), ["a"]),
        (clocks(5.0, 5.1, 4.9), ["here"]),
        (clocks(0.0, 4.0, 0.1, -7.0), ["b", "d"]),
        (clocks(0.0, 3.0, uncertainty=2.5), []),
        ({}, []),
    ],
)
def test_a_clock_is_wrong_that_surely_differs_from_most(found, wrong):
    assert [one.host for one in judge_clocks(found, "here")] == wrong


def test_what_is_said_of_a_clock():
    (fault,) = judge_clocks(clocks(0.0, -61.25), "here")
    assert fault.kind == "clock"
    assert fault.text.startswith("its clock is 61.2 s behind the others. Let it follow NTP")


@pytest.mark.parametrize(
    ("count", "slow", "wrong"),
    [
        (2, {}, []),
        (4, {}, []),
        (2, {(0, 1): 4.0}, []),  # a disturbed measurement
        (2, {(1, 0): 0.04}, ["b"]),
        (2, {(0, 1): 0.04}, ["a"]),
        (3, {(2, 0): 0.1, (2, 1): 0.1}, ["c"]),
        (3, {(0, 2): 0.1, (1, 2): 0.1}, ["c"]),  # what it receives is slow
        (4, {(1, 0): 1, (1, 2): 1, (1, 3): 1, (0, 1): 1, (2, 1): 1, (3, 1): 1}, ["b", "b"]),
        (4, {(1, 3): 1.0}, ["b"]),
    ],
)
def test_the_host_that_is_at_most_slow_links_is_named(count, slow, wrong):
    assert named(count, slow) == wrong


def test_a_host_whose_other_links_are_fast_is_told_so():
    (fault,) = judge_links(links(3, {(1, 2): 0.5}), NAMES[:3])
    assert fault.text.startswith("it sends only 0.5 Gbit/s to c, and the fastest link has 10 Gbit/s.")
    assert "Its other links are not slow: look at the way between it and c." in fault.text


def test_what_is_expected_counts_instead_of_the_fastest():
    both = {(0, 1): 2.0, (1, 0): 2.0}
    assert named(2, both) == []
    assert named(2, both, expected_gbit=2.5) == ["a", "b"]
    assert named(3, {(0, 1): 3.0}, expected_gbit=2.5) == []


def test_links_far_below_what_their_interfaces_are_made_for_are_slow():
    both = {(0, 1): 0.9, (1, 0): 0.9}
    of = [Equipment(["cpu"], None, "eth0", speed) for speed in (10.0, 25.0)]
    unknown = [Equipment(["cpu"], None, "eth0", None)] * 2
    assert named(2, both, equipment=of) == ["a", "b"]
    assert named(2, both, equipment=unknown) == []
