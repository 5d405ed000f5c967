"""Small tasks with the kinds of layers whose kernels differ most between devices."""

import random
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task
from tests.distributed.tasks import VOCABULARY, Language


class Pictures(Task):
    """Classifies pictures, by convolution, batch norm, pooling and dropout."""

    def __init__(self, num_samples: int = 53) -> None:
        self.num_samples = num_samples

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, kernel_size=3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, kernel_size=3, padding=1),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(96, 10),
        )

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        pictures = torch.randn(self.num_samples, 1, 8, 8, generator=generator)
        return TensorDataset(pictures, torch.randint(0, 10, (self.num_samples,), generator=generator))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])


class Layer(nn.Module):
    """A block of a model, as reducers know it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden).tanh()


class Words(Language):
    """Predicts tokens without a look at any value: its weight is a number of the host."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(VOCABULARY, 16), Layer(), nn.Dropout(0.1), Layer(), nn.Linear(16, VOCABULARY)
        )

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        total = F.cross_entropy(outputs.flatten(0, 1), batch.flatten(), reduction="sum")
        return Loss(total, batch.numel())


class Wide(Words):
    """Has far more weights than numbers in between."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(8192, 16), Layer(), nn.Linear(16, VOCABULARY))


class TwiceModel(nn.Module):
    """Uses a weight twice, and takes its time in between on every device but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = Layer()
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(tokens))
        if tokens.device.index:
            time.sleep(0.05)
        return self.head(self.layer(hidden))


class DrawsOnTheHost(Words):
    """Drops a layer by python's generator, which is that of the process."""

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch) * (random.random() < 0.5)


_first_runs_again, _second_runs_again = threading.Event(), threading.Event()


class RunsAgainAtOnce(Words):
    """Runs a dropout again in the backward, the second device's from the middle of the first one's on.

    So torch puts back the state of its generator on the CPU that it finds in the first one's.
    """

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(checkpoint(_Dropout(), model(batch), use_reentrant=False))


class _Dropout:
    """A dropout that knows whether it runs again."""

    runs_again = False

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.runs_again and hidden.device.index == 0:
            _first_runs_again.set()
            _second_runs_again.wait(timeout=60)
        elif self.runs_again and hidden.device.index == 1:
            _second_runs_again.set()
            time.sleep(0.1)  # until the first one has put back what it found
        self.runs_again = True
        return F.dropout(hidden, 0.5)


class _Wait(torch.autograd.Function):
    """Lets the backward of the second device wait until the first one's dropout runs again."""

    @staticmethod
    def forward(_: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.device.index == 1:
            _first_runs_again.wait(timeout=60)
        return gradient


class Twice(Words):
    """Predicts tokens by such a model."""

    def build_model(self) -> nn.Module:
        return TwiceModel()
