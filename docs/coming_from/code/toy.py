"""The model and the data that all pages train on: points in a cube, of three classes."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """Two linear layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(16, 3),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(inputs)
        return logits


def make_points(num_samples: int, seed: int) -> TensorDataset:
    """Draw points, and label each with the axis, of three, on which it lies farthest."""
    generator = torch.Generator().manual_seed(seed)  # the global generator stays as it is
    points = torch.rand(num_samples, 8, generator=generator)
    return TensorDataset(points, points[:, :3].argmax(1))


# Neither is a multiple of a batch: the last step of each epoch is a partial one.
train_data = make_points(203, seed=1)
test_data = make_points(57, seed=2)
