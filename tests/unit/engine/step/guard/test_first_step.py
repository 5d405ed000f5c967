"""A bare loss that is a sum, or a mean over some targets, is warned of; one that may be a mean is not."""

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lanewise.engine.step.guard.first_step import FirstStep
from lanewise.engine.step.terms import check_whole
from lanewise.engine.step.totals import StepTotals
from lanewise.lanes import LaneTurn
from lanewise.processes.world.world import LocalWorld
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


def mean_of(caplog, loss: object) -> str:
    """Return over what the first step says that a loss of four samples is a mean."""
    model = SimpleNamespace(named_parameters=dict)
    reducer = SimpleNamespace(register_hooks=lambda _: [], replicas=[], model=model)
    look = FirstStep(reducer, LocalWorld(torch.device("cpu")))
    turn = LaneTurn(0, 0, 0, range(4), range(1), is_last=True)
    look.after_forward(turn, check_whole(loss, 4, "the loss"))
    look.finish(StepTotals([]))
    found = (
        re.search("is a mean over (.*), and taken as one over samples", said) for said in caplog.messages
    )
    return "".join(match[1] for match in found if match)


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


SOME = torch.tensor([0, 1, -100, 0])
IGNORED = "the targets that are not ignored"
MEANS: dict[str, tuple[str, Callable[[], object]]] = {
    "bare": (IGNORED, lambda: F.cross_entropy(OUTPUTS, SOME)),
    "all count": ("", lambda: F.cross_entropy(OUTPUTS, CLASSES)),
    "of each sample": ("", lambda: sum(F.cross_entropy(OUTPUTS + row, SOME) for row in range(4)) / 4),
    "a Loss": ("", lambda: Loss.mean(F.cross_entropy(OUTPUTS, SOME), 3)),
    "several": ("", lambda: [Loss.mean(F.cross_entropy(OUTPUTS, SOME), 3), Loss(OUTPUTS.sum(), 4)]),
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_bare_mean_over_some_targets_is_named(caplog, kind: str):
    """A public job's model was off by 0.25 with another micro_batch_size, and nothing was said."""
    over, make = MEANS[kind]
    assert mean_of(caplog, make()) == over
