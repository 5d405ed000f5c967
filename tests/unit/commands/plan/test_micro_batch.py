"""The largest micro-batch that fits, found from two small ones."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lanewise import Task
from lanewise.commands.plan import micro_batch
from lanewise.config import BatchConfig
from lanewise.errors import ConfigError
from lanewise.processes.world.world import LocalWorld
from tests.distributed.tasks import configure
from tests.slow import slow

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


def find(monkeypatch, free, *, has_room=lambda _trial: True, threads=1, task=Wide) -> int:
    monkeypatch.setattr(micro_batch, "free_bytes", free if callable(free) else lambda *_: free)
    config = configure(task, equality="close", steps=7)
    config = replace(
        config,
        batch=BatchConfig(global_batch_size=120, micro_batch_size=1),
        distributed=replace(config.distributed, threads=threads),
    )
    memory = micro_batch.MemoryJob(config).run(LocalWorld(CPU))
    return micro_batch.largest_that_fits(config, memory, has_room)


def test_it_divides_the_global_batch_and_fits_with_a_margin(monkeypatch):
    found = {free: find(monkeypatch, free * 2**20) for free in (8, 16, 64)}
    assert found[64] == 120
    assert 1 < found[8] < found[16] < 120
    assert all(120 % size == 0 for size in found.values())
    # AdamW: parameters, gradients, two states and temporaries take less than 2 MiB. Three tensors of a lane
    # are there at once.
    assert found[16] * 3 * 4 * WIDTH < 8 * 2**20


class WideStream(Wide):
    """The same samples, one after the other."""

    def train_dataset(self) -> Any:
        return StreamOf(400)


class WideLanes(Wide):
    """The same samples, some in each lane; lane 1 has none."""

    def train_dataset(self) -> Any:
        return LanesOf(100)


class StreamOf:
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return ([torch.ones(1)] for _ in range(self.num_samples))


class LanesOf(StreamOf):
    def iter_lane(self, _epoch: int, lane: int, _num_lanes: int) -> Iterator[Any]:
        return iter([]) if lane == 1 else iter(self)


@pytest.mark.parametrize("task", [*slow(WideStream), WideLanes])
def test_a_stream_gives_the_size_that_its_samples_would_give_with_an_index(monkeypatch, task):
    assert find(monkeypatch, 16 * 2**20, task=task) == find(monkeypatch, 16 * 2**20)


def test_the_free_memory_is_that_of_a_process_for_each_of_its_cores(monkeypatch):
    asked = []

    def free_bytes(_device: torch.device, num_processes: int) -> int:
        asked.append(num_processes)
        return 2**24

    monkeypatch.setattr(micro_batch.os, "cpu_count", lambda: 8)
    assert find(monkeypatch, free_bytes, threads=2) < 60
    assert asked == [4]


def test_the_next_smaller_divisor_is_tried_where_a_process_did_not_get_through(monkeypatch):
    tried = []

    def has_room(trial):
        tried.append((trial.batch.global_batch_size, trial.batch.micro_batch_size))
        return trial.batch.micro_batch_size <= 40

    assert find(monkeypatch, 2**30, has_room=has_room) == 40
    assert tried == [(120, 120), (120, 60), (120, 40)]
    with pytest.raises(ConfigError, match="no micro-batch fits"):
        find(monkeypatch, 2**30, has_room=lambda _trial: False)


def test_nothing_that_fits_and_nobody_that_tells_are_errors(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    remedy = (
        r"no micro-batch fits: .* takes about .* of the type cpu, .* of which 50% .*activation_checkpointing"
    )
    with pytest.raises(ConfigError, match=remedy):
        find(monkeypatch, 2**10)
    with pytest.raises(ConfigError, match=r"which is unknown here: got device type cpu."):
        find(monkeypatch, None)
    assert "in an epoch" not in caplog.text  # of the trials
