"""A step reads values of the device through one function alone; any other read would wait for the device."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lanewise import Loss
from lanewise.engine.engine import build_engine
from lanewise.processes.world.world import LocalWorld
from tests.distributed.tasks import Language, configure
from tests.slow import slow

READ = "start_copy_to_host"


class OnDevice(Language):
    """With buffers, and a weight that only the device knows."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(30, 4), nn.Flatten(0, 1), nn.BatchNorm1d(4), nn.Linear(4, 30))

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        total = F.cross_entropy(outputs, batch.flatten(), reduction="sum")
        return Loss(total, (batch != 0).sum())


class Reports(OnDevice):
    """Reports sums and weights that only the device knows."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        metrics = {"there": (loss.sum, loss.weight), "sum": (loss.sum, 2), "weight_of_it": (1.0, loss.weight)}
        return Loss(loss.sum, loss.weight, metrics=metrics)


class ReadsItself(OnDevice):
    """Looks at a value in another way."""

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        loss = super().loss(outputs, batch)
        loss.sum.item()
        return loss


class Reads:
    """Stands in for the function: a meta tensor has no values, so it makes some up."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __call__(self, tensor: torch.Tensor) -> Any:
        """See `lanewise.processes.device.accelerator`."""
        self.num_reads += 1
        made_up = torch.zeros if tensor.dtype == torch.bool else torch.ones
        there = made_up(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
        return lambda: there


def train_on_meta(
    monkeypatch: pytest.MonkeyPatch,
    task: type[Language] = OnDevice,
    *,
    looks: bool = False,
    **options: Any,
) -> list[int]:
    """Train on torch's meta device, where reading a value raises; return the reads of each step.

    Made-up values never change, so what is looked at in the first steps would never end; it may be left out.
    """
    monkeypatch.setattr(torch, "meta", ModuleType("meta"), raising=False)  # a device without streams
    reads = Reads()
    engine = build_engine(configure(task, **options), LocalWorld(torch.device("meta")))
    for name, module in list(sys.modules.items()):
        if name.startswith("lanewise.") and hasattr(module, READ):
            monkeypatch.setattr(module, READ, reads)
    if not looks:
        engine.step.pass_.looks.clear()
    counts = []
    for _ in engine.steps():
        counts.append(reads.num_reads)
        reads.num_reads = 0
    return counts


@pytest.mark.parametrize(
    ("optimizer", "equality"),
    [
        ("torch.optim.AdamW", "close"),
        *slow(("torch.optim.AdamW", "exact"), ("torch.optim.SGD", "close"), ("torch.optim.SGD", "exact")),
    ],
)
def test_a_step_reads_values_through_one_function(monkeypatch, equality, optimizer):
    """8 lanes: the weight and the buffers of each; one each for totals, norm, and the integer buffers."""
    counts = train_on_meta(monkeypatch, equality=equality, optimizer=optimizer)
    assert counts[:3] == [19, 19, 19]


def test_the_first_steps_read_the_parameters_through_it_too(monkeypatch):
    """At the begin of the step, before and after each backward; three results of a lane, and two weights."""
    assert train_on_meta(monkeypatch, looks=True)[:2] == [19 + 1 + 2 * 8 + 3 + 2] * 2


def test_what_a_loss_reports_is_read_with_the_totals(monkeypatch):
    assert train_on_meta(monkeypatch, Reports)[:3] == [19, 19, 19]


def test_any_other_read_is_found(monkeypatch):
    with pytest.raises(RuntimeError, match=r"Tensor\.item\(\) cannot be called on meta tensors"):
        train_on_meta(monkeypatch, ReadsItself)
