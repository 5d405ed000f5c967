"""Turns, and the middle half of what they took."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.commands.bench.rounds import MiddleHalf, take_turns


def test_sides_take_turns_in_rounds():
    taken: list[str] = []

    def side(name: str):
        def take() -> int:
            taken.append(name)
            return len(taken)

        return take

    rounds = list(islice(take_turns({name: side(name) for name in "abc"}), 2))
    assert taken == list("abcabc")
    assert rounds == [{"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 5, "c": 6}]


@given(st.lists(st.floats(0.1, 10), min_size=1))
def test_the_middle_half_has_half_of_the_values(values):
    low, median, high = MiddleHalf.of(values)
    assert min(values) <= low <= median <= high <= max(values)
    assert sum(low <= value <= high for value in values) >= len(values) / 2 - 1


def test_its_width_is_a_part_of_the_median():
    assert MiddleHalf.of([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)
    assert MiddleHalf(2, 4, 5).width == 0.75
    assert MiddleHalf.of([7.0]).width == pytest.approx(0)
