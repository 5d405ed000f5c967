"""A bare loss that is a sum is warned of, and one that may be a mean is not."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lanewise.engine.step.guard.first_step import FirstStep
from lanewise.engine.step.terms import check_whole
from lanewise.lanes import LaneTurn
from lanewise.task import Loss

OUTPUTS = torch.arange(12.0).view(4, 3).requires_grad_()
CLASSES = torch.tensor([0, 1, 2, 0])
TARGETS = torch.ones(4, 3)


def warnings_of(caplog, loss: object) -> list[str]:
    """Return what is said of a loss of four samples in the first step."""
    reducer = SimpleNamespace(register_hooks=lambda _: [], replicas=[])
    look = FirstStep(reducer, SimpleNamespace(rank=0))
    for lane in range(2):
        checked = check_whole(loss, 4, "the loss")
        look.after_forward(LaneTurn(0, 0, lane, range(4), range(2), is_last=False), checked)
    return caplog.messages


SUMS = {
    "cross entropy": lambda: F.cross_entropy(OUTPUTS, CLASSES, reduction="sum"),
    "with smoothed labels": lambda: F.cross_entropy(OUTPUTS, CLASSES, reduction="sum", label_smoothing=0.1),
    "squares": lambda: F.mse_loss(OUTPUTS, TARGETS, reduction="sum"),
    "of means over features": lambda: OUTPUTS.square().mean(1).sum(),
    "of an autoencoder": lambda: (
        F.binary_cross_entropy_with_logits(OUTPUTS, TARGETS, reduction="sum")
        - 0.5 * torch.sum(1 + OUTPUTS - OUTPUTS.exp())
    ),
    "one by one": lambda: sum(OUTPUTS[row].square().sum() for row in range(4)),
    "added for long": lambda: sum([OUTPUTS.sum()] * 3000),
    "in half": lambda: OUTPUTS.bfloat16().sum().float().view(1),
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_bare_sum_is_warned_of(caplog, kind: str):
    """It trained as many times too fast as a micro-batch has samples, without a word."""
    (said,) = warnings_of(caplog, SUMS[kind]())
    assert said.endswith("If it adds them up, return lanewise.Loss(sum, weight)")


OTHERS: dict[str, Callable[[], object]] = {
    "mean": lambda: F.cross_entropy(OUTPUTS, CLASSES),
    "mean of sums": lambda: OUTPUTS.square().sum(1).mean(),
    "sum of means over samples": lambda: OUTPUTS.square().mean(0).sum(),
    "sum of several means": lambda: torch.stack([OUTPUTS.mean(), OUTPUTS.exp().mean()]).sum(),
    "mean and penalty": lambda: OUTPUTS.mean() + 0.1 * OUTPUTS.square().sum(),
    "divided": lambda: F.cross_entropy(OUTPUTS, CLASSES, reduction="sum") / 4,
    "of a mask": lambda: (OUTPUTS * TARGETS).sum() / TARGETS.sum(),
    "of another kind": OUTPUTS.norm,
    "an output": lambda: OUTPUTS[0, 0],
    "a Loss": lambda: Loss(OUTPUTS.sum(), 4),
    "a list of Loss": lambda: [Loss(OUTPUTS.sum(), 4), Loss(OUTPUTS.square().sum(), 2)],
    "nothing": lambda: Loss(OUTPUTS.sum(), 0),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_may_be_a_mean_is_not(caplog, kind: str):
    assert warnings_of(caplog, OTHERS[kind]()) == []
