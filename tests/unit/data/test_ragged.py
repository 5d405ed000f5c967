"""Lists of different lengths in one tensor."""

import torch

from lanewise.data import Ragged
from lanewise.nested import map_leaves


def test_lengths():
    assert Ragged(torch.arange(3), torch.tensor([0, 1, 1, 3])).lengths.tolist() == [1, 0, 2]
    assert Ragged(torch.arange(0), torch.tensor([0])).lengths.tolist() == []


def test_it_moves_with_a_batch():
    moved = map_leaves(lambda tensor: tensor + 1, {"x": Ragged(torch.arange(1), torch.tensor([0, 1]))})
    assert isinstance(moved["x"], Ragged)
    assert moved["x"].values.tolist() == [1]
