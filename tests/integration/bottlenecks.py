"""Tasks that one thing bounds, for `lanewise bench`."""

import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lanewise import Task


class Points(Dataset[Any]):
    """Random points, each of which takes so long to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.points = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.points[index], index % 10


class Layers(Task):
    """A small classifier.

    Args:
        width: of its only hidden layer.
        seconds: that a sample takes to read.
    """

    def __init__(self, width: int = 32, seconds: float = 0.0) -> None:
        self.width = width
        self.seconds = seconds

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def train_dataset(self) -> Dataset[Any]:
        return Points(self.seconds)

    def eval_datasets(self) -> dict[str, Dataset[Any]]:
        return {"all": Points(0.0)}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])


class ManyPasses(Layers):
    """Goes through one small layer a thousand times."""

    def build_model(self) -> nn.Module:
        return nn.Linear(32, 32)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = batch[0]
        for _ in range(1000):
            outputs = model(outputs).relu()
        return outputs


class ManyWeights(Layers):
    """Four million weights that are updated for a forward that reads one row of them for each sample."""

    def build_model(self) -> nn.Module:
        return nn.EmbeddingBag(400_000, 10, mode="sum")

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[1].unsqueeze(1))


class FailsOnRankOne(Layers):
    """Raises on one of two processes."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            raise RuntimeError("this is what failed")
        return super().loss(outputs, batch)
