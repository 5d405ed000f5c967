"""One buffer: an evaluation puts it back, whatever a forward did with it."""

import pytest
import torch
from torch import nn

from lanewise.engine.buffers.pack import evaluating
from lanewise.errors import TaskError


class Changing(nn.Module):
    """Has a buffer that a forward replaces by one of another shape, one that begins as None, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("late", None)


def test_an_evaluation_puts_every_buffer_back():
    norm, changing = nn.BatchNorm1d(2), Changing()
    kept = changing.replaced
    with evaluating([nn.Sequential(norm, changing)]):
        norm(torch.randn(4, 2))
        changing.replaced = changing.late = torch.ones(3)
    assert norm.running_mean.tolist() == [0.0, 0.0]
    assert norm.num_batches_tracked.item() == 0
    assert changing.replaced is kept
    assert kept.tolist() == [0.0]
    assert changing.late is None


def test_a_parameter_that_an_evaluation_changes_is_an_error():
    """An embedding with max_norm scales its rows in a forward, those of the samples that a process has."""
    embedding = nn.Embedding(3, 2, max_norm=0.1)
    with (
        pytest.raises(TaskError, match="an evaluation changed parameter weight"),
        evaluating([embedding]),
    ):
        embedding(torch.tensor([0, 1]))
