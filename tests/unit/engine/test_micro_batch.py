"""The largest micro-batch that fits, found from two small ones."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lanewise import Task
from lanewise.config import BatchConfig
from lanewise.engine import micro_batch
from lanewise.errors import ConfigError
from lanewise.world.world import LocalWorld
from tests.distributed.tasks import configure

CPU = torch.device("cpu")
WIDTH = 1 << 14


class Wide(Task):
    """Of each sample 64 KiB are saved for the backward of `exp`, and as much again lives beside it."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, WIDTH)

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.ones(400, 1))

    def forward(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).exp()

    def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        return outputs.mean()


def find(monkeypatch, free_bytes, *, global_batch_size: int = 120) -> int:
    monkeypatch.setattr(micro_batch, "free_bytes", lambda *_: free_bytes)
    batch = BatchConfig(global_batch_size=global_batch_size, micro_batch_size="auto")
    config = replace(configure(Wide, equality="close", steps=7), batch=batch)
    return micro_batch.find_micro_batch_size(config, LocalWorld(CPU), None)


def test_it_divides_the_global_batch_and_fits_with_a_margin(monkeypatch):
    found = {free: find(monkeypatch, free * 2**20) for free in (8, 16, 64)}
    assert found[64] == 120
    assert 1 < found[8] < found[16] < 120
    assert all(120 % size == 0 for size in found.values())
    # AdamW: parameters, gradients, two states and temporaries take less than 2 MiB. Three tensors of a lane
    # are there at once.
    assert found[16] * 3 * 4 * WIDTH < 8 * 2**20


def test_what_was_found_is_said_with_the_line_to_write(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    size = find(monkeypatch, 2**30)
    assert f"auto is {size} here" in caplog.text
    assert f"batch: {{global_batch_size: 120, micro_batch_size: {size}}}" in caplog.text
    assert "in an epoch" not in caplog.text  # of the trials


def test_nothing_that_fits_and_nobody_that_tells_are_errors(monkeypatch):
    with pytest.raises(ConfigError, match=r"finds none that fits.*activation_checkpointing"):
        find(monkeypatch, 2**10)
    with pytest.raises(ConfigError, match=r"which nobody tells here: got device type cpu. Give a number"):
        find(monkeypatch, None)
