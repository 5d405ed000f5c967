"""Tests for lanewise.adapt.optimizer."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from lanewise.adapt.optimizer import BuiltOptimizer, schedule
from lanewise.config import ClassConfig
from lanewise.config.classes import build
from lanewise.errors import ConfigError


def model():
    """Return a model, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def built_anew(built, of_model):
    """The optimizer and the scheduler that a run builds."""
    sections = {name: ClassConfig(**section) for name, section in built.sections.items()}
    optimizer = build("optimizer", sections["optimizer"], built.parameter_groups(of_model))
    return optimizer, build(
        "scheduler", sections["scheduler"], optimizer
    ) if "scheduler" in sections else None


def test_the_options_that_are_no_defaults_are_those_of_a_configuration():
    own = model()
    groups = [{"params": own[0].parameters(), "lr": 0.5}, {"params": [own[1].weight], "weight_decay": 0.0}]
    built = BuiltOptimizer(torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), fused=True), None, own)
    assert built.sections == {
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "betas": [0.8, 0.9]}}
    }
    other = model()
    optimizer, _ = built_anew(built, other)
    first, second = optimizer.param_groups
    assert [first["params"][0] is other[0].weight, len(first["params"])] == [True, 2]
    assert second["params"] == [other[1].weight]
    assert [group["lr"] for group in (first, second)] == [0.5, 0.1]
    assert [group["weight_decay"] for group in (first, second)] == [0.01, 0.0]
    assert [group["betas"] for group in (first, second)] == [(0.8, 0.9)] * 2


def test_a_rate_in_a_tensor_is_the_number_of_a_configuration():
    own = model()
    built = BuiltOptimizer(torch.optim.AdamW(own.parameters(), lr=torch.tensor(0.5)), None, own)
    assert built.sections["optimizer"]["init_args"] == {"lr": 0.5}
    assert type(built.sections["optimizer"]["init_args"]["lr"]) is float


@pytest.mark.parametrize("steps_per_value", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 2, 0.1),
        lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 4)),
        lambda optimizer: CosineAnnealingLR(optimizer, 5),
        lambda optimizer: OneCycleLR(optimizer, 0.7, total_steps=9, cycle_momentum=False),
    ],
)
def test_learning_rates_are_those_of_the_scheduler(make, steps_per_value):
    def made():
        own = model()
        groups = [{"params": own[0].parameters(), "lr": 0.3}, {"params": own[1].parameters()}]
        optimizer = torch.optim.SGD(groups, 0.1)
        return optimizer, make(optimizer), own

    built = BuiltOptimizer(*made(), steps_per_value)
    for _ in range(2):  # another run of the same task begins anew
        again, anew = built_anew(built, model())
        found = []
        for _ in range(8):
            found.append([group["lr"] for group in again.param_groups])
            again.step()
            anew.step()
        assert anew.last_epoch == 8
    optimizer, theirs, _ = made()
    expected = []
    for step in range(8):
        expected.append(pytest.approx([group["lr"] for group in optimizer.param_groups]))
        optimizer.step()
        if step % steps_per_value == steps_per_value - 1:
            theirs.step()
    assert found == expected


class Doubling(torch.optim.SGD):
    """Keeps another option than it was given."""

    def __init__(self, params, lr):
        super().__init__(params, 2 * lr)


def refused(make, scheduler_of=lambda _: None):
    own = model()
    optimizer = make(own)
    with pytest.raises(ConfigError) as refusal:
        BuiltOptimizer(optimizer, scheduler_of(optimizer), own)
    return str(refusal.value)


def test_what_cannot_be_built_anew_is_refused():
    assert "its lr would be 0.4 in place of 0.2" in refused(lambda own: Doubling(own.parameters(), 0.1))
    assert "of shape (3, 2) that is not the model's" in refused(
        lambda _: torch.optim.SGD(model().parameters(), 1)
    )

    def trained(own):
        optimizer = torch.optim.Adam(own.parameters())
        own(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    assert "the Adam has trained already" in refused(trained)


def test_a_scheduler_that_follows_a_metric_is_refused():
    said = refused(lambda own: torch.optim.SGD(own.parameters(), 0.1), ReduceLROnPlateau)
    assert "the ReduceLROnPlateau is stepped with a metric" in said


class Slowing(StepLR):
    """Changes momentum too."""

    def step(self, epoch=None):
        super().step(epoch)
        self.optimizer.param_groups[0]["momentum"] = 0.5


def test_a_scheduler_that_changes_momentum_is_refused():
    """Those of torch at once, as a long preparation may come before the first step; others in that step."""
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="the OneCycleLR changes more than learning rates"):
        BuiltOptimizer(optimizer, OneCycleLR(optimizer, 0.7, total_steps=9), own)
    optimizer = torch.optim.SGD(own.parameters(), 0.1, momentum=0.9)
    scheduler = StepLR(optimizer, 2)
    scheduler.__class__ = Slowing  # its constructor steps as well
    again, anew = built_anew(BuiltOptimizer(optimizer, scheduler, own), model())
    again.step()
    with pytest.raises(ConfigError, match="the Slowing changes more than learning rates"):
        anew.step()


def test_the_state_of_the_schedule_is_a_number_of_steps():
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    built = BuiltOptimizer(optimizer, StepLR(optimizer, 2), own)
    again, anew = built_anew(built, model())
    for _ in range(5):
        again.step()
        anew.step()
    resumed = schedule(built_anew(built, model())[0])
    resumed.load_state_dict(anew.state_dict())
    assert resumed.last_epoch == 5
    assert resumed.get_last_lr() == anew.get_last_lr() == [pytest.approx(0.001)]
