"""`lanewise.verify` with a task that is an object."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lanewise

SECTIONS = {
    "batch": {"global_batch_size": 8, "micro_batch_size": 4},
    "train": {"epochs": 1, "run_dir": "nothing is written there"},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    "distributed": {"equality": "exact"},
}


class Line(lanewise.Task):
    """Its samples are in no file, so that it can only be sent to the processes."""

    def __init__(self, samples: torch.Tensor, *, reads_world: bool = False) -> None:
        self.samples, self.reads_world = samples, reads_world

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(self.samples)

    def forward(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        factor = 2 if self.reads_world and dist.is_initialized() else 1
        return outputs.square().mean() * factor


@pytest.mark.parametrize("reads_world", [False, True])
def test_a_task_that_is_an_object_is_proved_or_the_cause_is_named(tmp_path, monkeypatch, reads_world):
    monkeypatch.chdir(tmp_path)
    samples = torch.arange(48.0).reshape(16, 3) / 48
    report = lanewise.verify(Line(samples, reads_world=reads_world), num_steps=2, **SECTIONS)
    assert report.is_verified is not reads_world
    said = str(report)
    assert said.startswith("steps ")
    assert ("depends on the rank" in said) is reads_world
    assert not list(tmp_path.iterdir())
