"""Recordings of operators, and where two of them part."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from lanewise.commands.verify.operators import first_divergence, recording
from lanewise.processes.device.determinism import set_determinism


@pytest.fixture(autouse=True)
def _exact():
    threads = torch.get_num_threads()
    set_determinism("exact", 1)
    yield
    set_determinism("close", threads)
    torch.use_deterministic_algorithms(False)


class Net(nn.Module):
    def __init__(self, noise=lambda given: given):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.drop = nn.Dropout(0.5)
        self.noise = noise

    def forward(self, given):
        return self.noise(self.drop(self.first(given))).square().sum()


def record(model):
    torch.manual_seed(1)
    model.zero_grad()
    with recording(model) as calls:
        model(torch.ones(2, 3)).backward()
    return calls


def test_equal_passes_have_equal_recordings():
    model = Net()
    calls = record(model)
    assert first_divergence(calls, record(model)) is None
    places = {call.operator: call.place for call in calls}
    assert places["aten.addmm.default"].startswith("module first")
    assert any("test_operators.py:" in place for place in places.values())
    assert any(place.startswith("the backward of") for place in places.values())


@torch.library.custom_op("test_operators::noisy", mutates_args=())
def noisy(given: torch.Tensor) -> torch.Tensor:
    return given + int.from_bytes(os.urandom(4)) / 2**32


noisy.register_autograd(lambda _, gradient: gradient)


def test_an_operator_that_is_not_deterministic_is_the_first_to_differ():
    model = Net(noisy)
    divergence = first_divergence(record(model), record(model))
    assert divergence is not None
    assert divergence.call.operator == "test_operators.noisy.default"
    assert divergence.has_equal_inputs
    assert not divergence.call.has_generator


def test_a_number_from_outside_differs_among_the_inputs():
    values = iter([0.5, 0.25])
    model = Net(lambda given: given * next(values))
    divergence = first_divergence(record(model), record(model))
    assert divergence is not None
    assert divergence.call.operator == "aten.mul.Tensor"
    assert not divergence.has_equal_inputs


def test_a_generator_of_ones_own_is_noticed():
    generator = torch.Generator().manual_seed(0)
    model = Net(lambda given: given + torch.rand(given.shape, generator=generator))
    divergence = first_divergence(record(model), record(model))
    assert divergence is not None
    assert divergence.call.has_generator


def test_another_path_is_a_difference():
    calls = record(Net())
    divergence = first_divergence(calls, calls[:-1])
    assert divergence is not None
    assert divergence.call == calls[-1]


def test_the_same_computation_on_another_line_is_no_difference():
    calls = record(Net())
    moved = [replace(call, place="elsewhere") for call in calls]
    assert first_divergence(calls, moved) is None


def test_recording_changes_nothing_and_leaves_nothing():
    model = Net()
    torch.manual_seed(1)
    plain = model(torch.ones(2, 3))
    torch.manual_seed(1)
    with recording(model):
        recorded = model(torch.ones(2, 3))
    assert torch.equal(plain, recorded)
    assert not model.first._forward_hooks
    assert not torch.utils.deterministic.fill_uninitialized_memory
