"""SimCLR: two random views of a digit are to agree, and to differ from all views of the other digits."""

from typing import Any

import torch
from simclr import ConvNet, load_digits, nt_xent, random_views
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lanewise import Callback, Task

Views = tuple[torch.Tensor, torch.Tensor]


class Contrastive(Task):
    """Learns features of digits without their labels.

    Args:
        width: channels of the last convolution.
        temperature: what similarities are divided by; the smaller, the more the nearest other digits count.
    """

    def __init__(self, width: int = 128, temperature: float = 0.2) -> None:
        self.width = width
        self.temperature = temperature

    def build_model(self) -> nn.Module:
        return ConvNet(self.width)

    def train_dataset(self) -> Dataset[Any]:
        images, _ = load_digits(held_out=False)
        return TensorDataset(images)

    def collate(self, samples: list[tuple[torch.Tensor]]) -> Views:
        images = torch.stack([image for (image,) in samples])
        return random_views(images), random_views(images)

    def forward(self, model: nn.Module, batch: Views) -> Views:
        first, second = model(torch.cat(batch)).chunk(2)
        return first, second

    def batch_loss(self, model: nn.Module, outputs: Views, inputs: None) -> torch.Tensor:
        return nt_xent(*outputs, self.temperature)


class Neighbours(Callback):
    """Shows held-out digits, each ahead of a row of those whose features are the most like its own."""

    model_every_steps = 160

    def on_model(self, epoch: int, step: int, model: nn.Module) -> None:
        images, _ = load_digits(held_out=True)
        embedded = model(images.to(next(model.parameters()).device))
        nearest = (embedded[::125] @ embedded.T).topk(8).indices.cpu()  # the first is the digit itself
        rows = [torch.cat(list(images[row, 0]), dim=1) for row in nearest]
        self.log_image("neighbours", torch.cat(rows))
