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


def find(
    monkeypatch, free_bytes, *, fits=lambda _trial: True, world=None, threads=1, task=Wide, **distributed
) -> int:
    monkeypatch.setattr(
        micro_batch, "free_bytes", free_bytes if callable(free_bytes) else lambda *_: free_bytes
    )
    batch = BatchConfig(global_batch_size=120, micro_batch_size="auto")
    config = configure(task, equality="close", steps=7)
    distributed = replace(config.distributed, threads=threads, **distributed)
    config = replace(config, batch=batch, distributed=distributed)
    return micro_batch.find_micro_batch_size(config, world or LocalWorld(CPU), None, fits)


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


@pytest.mark.parametrize("task", [WideStream, WideLanes])
def test_a_stream_gives_the_size_that_its_samples_would_give_with_an_index(monkeypatch, task):
    assert find(monkeypatch, 16 * 2**20, task=task) == find(monkeypatch, 16 * 2**20)


class Several(LocalWorld):
    """As if other processes did what this one does."""

    def __init__(self, world_size: int) -> None:
        super().__init__(CPU)
        self.world_size = world_size

    def all_gather_tree(self, value: object) -> list[object]:
        return [value] * self.world_size


def test_it_does_not_depend_on_the_number_of_devices(monkeypatch):
    """It was 12 on one process, and 6 on two of the same machine."""
    asked = []

    def free_bytes(_device: torch.device, num_processes: int) -> int:
        asked.append(num_processes)
        return 2**24

    monkeypatch.setattr(micro_batch.os, "cpu_count", lambda: 8)
    alone = find(monkeypatch, free_bytes, threads=2)
    assert alone < 60
    assert find(monkeypatch, free_bytes, threads=2, world=Several(2)) == alone
    assert find(monkeypatch, free_bytes, threads=2, reducer="data_parallel", devices=2) == alone
    assert asked == [4, 4, 4]  # as many as there are cores for


def test_fewer_lanes_than_devices_are_an_error_that_says_what_to_write(monkeypatch):
    remedy = r"got 1 lane .* 120 for 9 devices, .* Write batch.micro_batch_size=12, .* at least 1080"
    with pytest.raises(ConfigError, match=remedy):
        find(monkeypatch, 2**30, world=Several(9))
    with pytest.raises(ConfigError, match=r"for 2 devices, .*micro_batch_size=60"):
        find(monkeypatch, 2**30, reducer="balanced_data_parallel", devices=2)


def test_the_next_smaller_divisor_is_tried_where_a_process_did_not_get_through(monkeypatch):
    tried = []

    def fits(trial):
        tried.append((trial.batch.global_batch_size, trial.batch.micro_batch_size))
        return trial.batch.micro_batch_size <= 40

    assert find(monkeypatch, 2**30, fits=fits) == 40
    assert tried == [(120, 120), (120, 60), (120, 40)]
    with pytest.raises(ConfigError, match="finds no size that fits"):
        find(monkeypatch, 2**30, fits=lambda _trial: False)


def test_what_was_found_is_said_with_the_line_to_write(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    size = find(monkeypatch, 2**30)
    assert f"auto is {size} here" in caplog.text
    assert f"batch: {{global_batch_size: 120, micro_batch_size: {size}}}" in caplog.text
    assert "in an epoch" not in caplog.text  # of the trials


def test_nothing_that_fits_and_nobody_that_tells_are_errors(monkeypatch):
    with pytest.raises(ConfigError, match=r"finds no size that fits.*activation_checkpointing"):
        find(monkeypatch, 2**10)
    with pytest.raises(ConfigError, match=r"which is unknown here: got device type cpu. Give a number"):
        find(monkeypatch, None)
