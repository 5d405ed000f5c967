"""The model and the data as a task: what one device does."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from toy import Net, test_data, train_data

from lanewise import Task


class Points(Task):
    """Classifies points."""

    def build_model(self) -> nn.Module:
        return Net()

    def train_dataset(self) -> Dataset[Any]:
        return train_data

    def eval_datasets(self) -> dict[str, Dataset[Any]]:
        return {"test": test_data}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])

    def build_metrics(self) -> dict[str, Metric]:
        return {"accuracy": MulticlassAccuracy(3, average="micro")}

    def update_metrics(self, metrics: Any, outputs: torch.Tensor, batch: Any) -> None:
        metrics["accuracy"].update(outputs, batch[1])
