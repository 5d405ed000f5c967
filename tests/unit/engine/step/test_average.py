"""The average of the weights follows what is trained, and has what is frozen as it is."""

import pytest
import torch
from torch import nn

from lanewise.engine.step.average import build_average, update_average
from lanewise.errors import ConfigError


def test_it_begins_with_the_first_update_and_copies_what_is_frozen():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    trained, frozen = (layer.weight for layer in model)
    frozen.requires_grad_(False)
    average = build_average(model, 0.5)
    assert average is not None
    averaged = [layer.weight for layer in average.module]
    for value, expected in ((2.0, 2.0), (4.0, 3.0)):
        with torch.no_grad():
            trained.fill_(value)
            frozen.fill_(10 * value)
        update_average(average, model)
        assert [weight.item() for weight in averaged] == [expected, 10 * value]


def test_without_a_decay_there_is_none():
    assert build_average(nn.Linear(1, 1), None) is None


@pytest.mark.parametrize("decay", [0.0, 1.0, -1, 2.0])
def test_a_decay_out_of_range_is_an_error(decay):
    with pytest.raises(ConfigError, match="greater than 0 and less than 1: got"):
        build_average(nn.Linear(1, 1), decay)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_weight_that_is_computed_in_each_forward_is_computed_of_the_average(normed):
    """The old one keeps it with its graph between the forwards, of which torch makes no copy."""
    model = normed(nn.Linear(2, 1))
    before = model(torch.ones(2))
    average = build_average(model, 0.5)
    assert average is not None
    update_average(average, model)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    update_average(average, model)
    with torch.no_grad():
        twin = normed(nn.Linear(2, 1))
        for own, parameter in zip(twin.parameters(), model.parameters(), strict=True):
            own.copy_(parameter - 0.5)
        assert torch.equal(average.module(torch.ones(2)), twin(torch.ones(2)))
        assert not torch.equal(model(torch.ones(2)), before)
    model(torch.ones(2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
