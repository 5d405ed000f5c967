"""Padded rows hold the sequences, and the mask tells where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lanewise.data import Padded, Ragged, pad
from lanewise.errors import DataError
from lanewise.nested import map_leaves

LISTS = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=6)


def as_ragged(lists):
    offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
    return Ragged(torch.tensor(sum(lists, []), dtype=torch.int64), offsets)  # noqa: RUF017 - short


def as_tensors(lists):
    return [torch.tensor(one, dtype=torch.int64) for one in lists]


@given(LISTS, st.integers(-5, 5), st.sampled_from([as_ragged, as_tensors]))
def test_the_sequences_come_back(lists, value, given_as):
    padded = pad(given_as(lists), value)
    assert padded.values.dtype == padded.lengths.dtype == torch.int64
    assert padded.values.shape == (len(lists), max(map(len, lists), default=0))
    assert padded.lengths.tolist() == [len(one) for one in lists]
    rows = zip(padded.values, padded.mask, strict=True)
    assert [row[own].tolist() for row, own in rows] == lists
    assert all(other == value for other in padded.values[~padded.mask].tolist())


def test_rows_and_mask():
    padded = pad(as_ragged([[1, 2, 3], [], [4]]), -100)
    assert padded.values.tolist() == [[1, 2, 3], [-100] * 3, [4, -100, -100]]
    assert padded.mask.dtype == torch.bool
    assert padded.mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]


def test_zeros_are_the_default_and_the_dtype_stays():
    padded = pad([torch.ones(1, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)])
    assert padded.values.dtype == torch.bfloat16
    assert padded.values.tolist() == [[1, 0], [1, 1]]


def test_tensors_are_mapped_within():
    padded = map_leaves(lambda tensor: tensor * 2, pad(as_ragged([[1], [2, 3]])))
    assert isinstance(padded, Padded)
    assert (padded.values.tolist(), padded.lengths.tolist()) == ([[2, 0], [4, 6]], [2, 4])


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([torch.ones(1), torch.ones(2, 3)], r"Sequence 1 is torch\.float32 \[2, 3\]"),
        (
            [torch.ones(1), torch.ones(1).int()],
            r"Sequence 1 is torch\.int32 \[1\], and sequence 0 is torch\.float32",
        ),
        ([torch.tensor(1)], r"Sequence 0 is torch\.int64 \[\]"),
        (Ragged(as_ragged([[1]]), torch.tensor([0, 1])), "hold sequences again"),
        (Ragged(torch.ones(2, 2), torch.tensor([0, 2])), "hold sequences again"),
    ],
)
def test_what_is_no_sequence_of_one_dtype_is_refused(sequences, message):
    with pytest.raises(DataError, match=message):
        pad(sequences)
