"""Loader workers own contiguous lanes, and are asked in turn."""

from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.data.workers import deal, worker_shares


@given(start=st.integers(0, 5), num_lanes=st.integers(1, 9), num_workers=st.integers(0, 12))
def test_the_lanes_are_shared_without_a_gap(start, num_lanes, num_workers):
    lanes = range(start, start + num_lanes)
    shares = worker_shares(lanes, num_workers)
    assert [lane for share in shares for lane in share] == list(lanes)
    assert len(shares) == max(1, min(num_workers, num_lanes))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("of_workers", "asked"),
    [([], []), (["abc"], ["a", "b", "c"]), (["ab", "", "c"], ["a", None, "c", "b", None, None])],
)
def test_a_worker_that_has_nothing_left_is_asked_for_nothing(of_workers, asked):
    assert list(deal(of_workers)) == asked


def test_no_more_is_taken_than_is_asked():
    assert list(islice(deal([count(), count(10)]), 4)) == [0, 10, 1, 11]
