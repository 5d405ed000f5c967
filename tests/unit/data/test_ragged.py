"""Sequences of different lengths lie in one tensor."""

import torch

from lanewise.data import Ragged
from lanewise.nested import map_leaves


def test_lengths_of_sequences_and_of_sequences_of_them():
    inner = Ragged(torch.arange(6), torch.tensor([0, 2, 2, 6]))
    assert inner.lengths.tolist() == [2, 0, 4]
    assert Ragged(inner, torch.tensor([0, 1, 3])).lengths.tolist() == [1, 2]


def test_tensors_are_mapped_within():
    ragged = Ragged(Ragged(torch.arange(2), torch.tensor([0, 2])), torch.tensor([0, 1]))
    mapped = map_leaves(lambda tensor: tensor + 1, ragged)
    assert isinstance(mapped.values, Ragged)
    assert (mapped.values.values.tolist(), mapped.offsets.tolist()) == ([1, 2], [1, 2])
