"""Groups of pairs, for any number of hosts."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lanewise.commands.doctor.measure import groups_of_pairs


@given(st.integers(0, 40))
def test_every_pair_comes_once(count):
    pairs = [pair for pairs in groups_of_pairs(count) for pair in pairs]
    assert sorted(pairs) == list(combinations(range(count), 2))


@given(st.integers(0, 40))
def test_nobody_is_in_two_pairs_of_a_group(count):
    for pairs in groups_of_pairs(count):
        busy = [end for pair in pairs for end in pair]
        assert len(busy) == len(set(busy))


@given(st.integers(1, 20).map(lambda half: 2 * half))
def test_an_even_number_of_hosts_takes_one_group_less_than_there_are(count):
    groups = list(groups_of_pairs(count))
    assert len(groups) == count - 1
    assert all(len(pairs) == count // 2 for pairs in groups)
