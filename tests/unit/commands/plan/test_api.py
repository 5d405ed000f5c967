"""`lanewise.plan` with a task that is an object."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lanewise
from lanewise.errors import ConfigError

SECTIONS = {
    "batch": {"global_batch_size": 16, "micro_batch_size": 4},
    "train": {"epochs": 1, "run_dir": "nothing is written there"},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
}


class Line(lanewise.Task):
    def __init__(self, samples: torch.Tensor) -> None:
        self.samples, self.num_models = samples, 0

    def build_model(self) -> nn.Module:
        self.num_models += 1
        return nn.Linear(3, 1)

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(self.samples)

    def forward(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        return outputs.square().mean()


def test_a_plan_has_the_rows_of_the_command_and_leaves_task_and_random_state_as_they_were():
    task, plan = Line(torch.ones(32, 3)), lanewise.plan
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state().tolist()
    found = plan(task, devices=[1, 2], memory_gib=1, **SECTIONS)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert task.num_models == 0
    assert {row.setting.reducer for row in found.rows} > {"single", "ddp", "fsdp"}
    assert "balanced_data_parallel" in str(found)
    assert not Path(SECTIONS["train"]["run_dir"]).exists()


def test_what_is_no_task_is_refused():
    with pytest.raises(ConfigError, match=r"must be a lanewise\.Task: got 3"):
        lanewise.plan(3, **SECTIONS)


def test_a_world_that_torchrun_started_is_refused(monkeypatch):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="run it without torchrun"):
        lanewise.plan(Line(torch.ones(4, 3)), **SECTIONS)
