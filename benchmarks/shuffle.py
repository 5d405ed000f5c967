"""Whether a network learns as well from files that are read block by block as from a full shuffle.

    python benchmarks/shuffle.py

The 4,000 training digits of examples/mnist, sorted by class, in blocks of equal size: of 10 blocks each has
one class only. A ConvNet with BatchNorm, global batches of 128, 4 epochs, AdamW, one process; each round has
another seed. The figure is the accuracy on the 1,000 digits that are held out, so a spread is that of seeds.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from section import publish, spread, table
from torch.nn import functional as F
from torch.utils.data import Dataset

from lanewise import Lanes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "mnist"))

from mnist import ConvNet, Mnist

NUM_LANES = (1, 2, 8)
NUM_BLOCKS = (10, 160)


class SortedDigits(Dataset[Any]):
    """Digits by class, in blocks."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, num_blocks: int) -> None:
        by_class = labels.argsort(stable=True)
        self._images, self._labels = images[by_class], labels[by_class]
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        rows = list(indices)
        return [(self._images[rows], self._labels[rows])]

    def block_sizes(self) -> list[int]:
        """Blocks of one size, but for a rest."""
        size = len(self) // self._num_blocks
        return [size] * (self._num_blocks - 1) + [len(self) - size * (self._num_blocks - 1)]


def accuracy(num_lanes: int, order: str, num_blocks: int, seed: int) -> float:
    """Train, and return the accuracy on the digits that are held out."""
    task = Mnist()
    train: Any = task.train_dataset()
    (held_out,) = task.eval_datasets().values()
    lanes = Lanes(global_batch_size=128, micro_batch_size=128 // num_lanes, seed=seed, device_type="cpu")
    model = lanes.prepare(ConvNet(dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = SortedDigits(train.images, train.labels, num_blocks)
    steps = lanes.steps(dataset, collate=lambda samples: samples[0], order=order)
    for _ in range(4):
        for step in steps:
            for images, labels in step:
                step.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        images, labels = held_out[:]
        right: float = (model(images).argmax(dim=1) == labels).double().mean().item()
    lanes.close()
    return right


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each order and number of lanes."""
    orders = [("shuffled", NUM_BLOCKS[0]), *(("blocked", number) for number in NUM_BLOCKS)]
    cases = [(num_lanes, *order) for num_lanes in NUM_LANES for order in orders]
    found: dict[tuple[int, str, int], list[float]] = {case: [] for case in cases}
    for seed in range(num_rounds):
        for case in cases:
            found[case].append(accuracy(*case, seed))
    rows = [
        [str(num_lanes), order, str(num_blocks) if order == "blocked" else "", spread(values, ".3f")]
        for (num_lanes, order, num_blocks), values in found.items()
    ]
    yield table(["lanes", "order", "blocks", "accuracy"], rows)


if __name__ == "__main__":
    publish("A shuffle of blocks", __doc__, measure, num_rounds=8)
