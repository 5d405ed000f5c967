"""Rounds of pairs, for any number of hosts."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lanewise.commands.doctor.measure import rounds_of_pairs


@given(st.integers(0, 40))
def test_every_pair_comes_once(count):
    pairs = [pair for one in rounds_of_pairs(count) for pair in one]
    assert sorted(pairs) == list(combinations(range(count), 2))


@given(st.integers(0, 40))
def test_nobody_is_in_two_pairs_of_a_round(count):
    for pairs in rounds_of_pairs(count):
        busy = [end for pair in pairs for end in pair]
        assert len(busy) == len(set(busy))


@given(st.integers(1, 20).map(lambda half: 2 * half))
def test_an_even_number_of_hosts_takes_one_round_less_than_there_are(count):
    rounds = list(rounds_of_pairs(count))
    assert len(rounds) == count - 1
    assert all(len(pairs) == count // 2 for pairs in rounds)
