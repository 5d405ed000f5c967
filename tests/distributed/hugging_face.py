"""A GPT-2 and a BERT of Hugging Face as tasks; apart from their tests, since importing them takes seconds."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lanewise import Loss

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "coming_from" / "code"))
tasks = importlib.import_module("hugging_face_tasks")

PADDING = {"input_ids": tasks.PADDING, "attention_mask": 0, "labels": -100}


GPT2, Bert = tasks.GPT2, tasks.Bert


class Smooth:
    """Makes a task one in float64 without dropout, which remembers what it saw; some rows have one token."""

    def __init__(self) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []
        self.weights: list[float] = []

    def build_model(self) -> nn.Module:
        model = super().build_model().double()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def train_dataset(self) -> Any:
        return super().train_dataset()[:9] + [torch.tensor([65])] * 4

    def forward(self, model: nn.Module, batch: Any) -> Any:
        self.batches.append(batch)
        return super().forward(model, batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss = super().loss(outputs, batch)
        self.weights.append(float(loss.weight))
        return loss


class SmoothGPT2(Smooth, tasks.GPT2): ...


class SmoothBert(Smooth, tasks.Bert): ...


class BareGPT2(SmoothGPT2):
    def loss(self, outputs, batch):
        return outputs.loss


class BareBert(SmoothBert):
    def loss(self, outputs, batch):
        return outputs.loss


class UnshiftedGPT2(SmoothGPT2):
    """Counts the first label of each row, which the model's shift leaves out."""

    def loss(self, outputs, batch):
        return Loss.mean(outputs.loss, weight=(batch["labels"] != -100).sum())
