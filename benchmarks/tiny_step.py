"""What a trainer adds to a step that costs almost nothing, in microseconds.

    python benchmarks/tiny_step.py

An MLP of 16-32-4, batches of 8 that are ready in memory and handed out by `__getitems__`, SGD, one process
with one thread. The bare loop is what a user writes by hand: zero_grad, forward, backward, step. Both sides
take turns, 200 optimizer steps each, once with one micro-batch a step and once with five; what is printed is
the median over the rounds of the difference, with the middle half of the rounds.
"""

# ruff: noqa: E402 - the environment is pinned before torch is imported
from lanewise.config import pin_environment

pin_environment(threads=1, equality="exact")

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lanewise import Task
from lanewise.config import BatchConfig, ClassConfig, DistributedConfig, Equality, RunConfig, TrainConfig
from lanewise.engine import build_engine
from lanewise.world.determinism import set_determinism
from lanewise.world.world import LocalWorld

ROUNDS, STEPS_PER_ROUND = 30, 200
BATCH_SIZE = 8
NUM_MICRO_BATCHES = 5
Batch = tuple[torch.Tensor, torch.Tensor]


class Ready(Dataset[Any]):
    """Micro-batches that lie in memory; a read of several samples gives one of them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(BATCH_SIZE, 16, generator=generator), torch.arange(BATCH_SIZE) % 4)
            for _ in range(64)
        ]

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        return [self.batches[indices[0] % 64]]


class Tiny(Task):
    """Classifies noise."""

    def build_model(self) -> nn.Module:
        """See `Task`."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def train_dataset(self) -> Ready:
        """See `Task`."""
        return Ready()

    def collate(self, samples: list[Batch]) -> Batch:
        """See `Task`."""
        return samples[0]

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """See `Task`."""
        outputs: torch.Tensor = model(batch[0])
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See `Task`."""
        return F.cross_entropy(outputs, batch[1])


def main() -> None:
    """Print a line for each grade."""
    for equality in ("close", "exact"):
        set_determinism(equality, threads=1)
        bare, one, several = measure(equality)
        added = [(b - a) * 1e6 for a, b in zip(bare[0], one, strict=True)]
        further = [
            ((d - c) - (b - a)) / (NUM_MICRO_BATCHES - 1) * 1e6
            for a, b, c, d in zip(bare[0], one, bare[1], several, strict=True)
        ]
        print(
            f"{equality}: bare loop {statistics.median(bare[0]) * 1e6:.0f} us a step; "
            f"lanewise adds {spread(added)} us, and {spread(further)} us for each further micro-batch"
        )


def measure(equality: Equality) -> tuple[list[list[float]], list[float], list[float]]:
    """Return the seconds of a step in each round: bare and lanewise, with 1 and 5 micro-batches."""
    sides = [
        *(bare_steps(number) for number in (1, NUM_MICRO_BATCHES)),
        *(lanewise_steps(number, equality) for number in (1, NUM_MICRO_BATCHES)),
    ]
    rounds = [[seconds(lambda side=side: next(side)) for side in sides] for _ in range(ROUNDS + 2)][2:]  # type: ignore[misc]
    bare, bare_several, one, several = map(list, zip(*rounds, strict=True))
    return [bare, bare_several], one, several


def bare_steps(num_micro_batches: int) -> Iterator[object]:
    """Train by hand."""
    task = Tiny()
    model, dataset = task.build_model(), task.train_dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    position = 0
    while True:
        optimizer.zero_grad()
        for _ in range(num_micro_batches):
            (batch,) = dataset.__getitems__(list(range(position, position + BATCH_SIZE)))
            position += BATCH_SIZE
            loss = F.cross_entropy(model(batch[0]), batch[1])
            (loss if num_micro_batches == 1 else loss / num_micro_batches).backward()
        optimizer.step()
        yield None


def lanewise_steps(num_micro_batches: int, equality: Equality) -> Iterator[object]:
    """Train through the engine, without loggers."""
    config = RunConfig(
        task=ClassConfig(class_path="unused"),
        batch=BatchConfig(global_batch_size=BATCH_SIZE * num_micro_batches, micro_batch_size=BATCH_SIZE),
        train=TrainConfig(run_dir="unused", max_steps=10**6),
        optimizer=ClassConfig(class_path="torch.optim.SGD", init_args={"lr": 0.01}),
        distributed=DistributedConfig(equality=equality),
    )
    return build_engine(config, LocalWorld(torch.device("cpu")), Tiny()).steps()


def seconds(step: Callable[[], object]) -> float:
    """Return the seconds of a step, as a mean over one round."""
    start = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        step()
    return (time.perf_counter() - start) / STEPS_PER_ROUND


def spread(values: list[float]) -> str:
    """Write the median, and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
