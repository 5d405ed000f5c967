"""A workload as lanewise takes it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from workload import WORKLOADS

from lanewise import Task


class Work(Task):
    """A workload, by its name and its sizes."""

    def __init__(self, name: str, sizes: Mapping[str, Any]) -> None:
        self.workload = WORKLOADS[name](**sizes)

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return self.workload.build_model()

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return self.workload.dataset()

    def collate(self, samples: list[Any]) -> Any:
        """See `Task`."""
        return self.workload.collate(samples)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """See `Task`. The workload's loss includes its forward."""
        return self.workload.loss(model, batch)

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """See `Task`."""
        return outputs
