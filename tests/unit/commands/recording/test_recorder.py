"""A tensor has one digest, whoever records it."""

import torch

from lanewise.commands.recording.recorder import tensor_digests
from lanewise.processes.world.digests import digests_of


def test_digests_are_those_of_a_state_and_a_sparse_buffer_has_one():
    """A graph may be a sparse buffer, which verify compares too."""
    dense = torch.eye(3)
    found = tensor_digests([("weight", dense), ("graph", dense.to_sparse())])
    assert {*found.values()} == {digests_of({"model": {"weight": dense}})["model/weight"]}
