"""Time of a training step against a hand-written loop, on one and two processes of this machine.

    python benchmarks/step.py

Both sides train the ConvNet of examples/mnist on the same dataset, 4 micro-batches of 16 digits a step,
float32, AdamW, one thread in each process. The hand-written side is plain PyTorch: a DataLoader, a loop over
micro-batches and, on two processes, DistributedDataParallel with `no_sync`. They take turns, 20 steps each,
in the same processes; the figure is the median over the rounds of lanewise's time / the hand-written loop's,
with the spread of the middle half of the rounds. 1.00 is no overhead.
"""

# ruff: noqa: E402 - the environment is pinned before torch is imported
from lanewise.config import pin_environment

pin_environment(threads=1, equality="exact")

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lanewise.config import BatchConfig, ClassConfig, DistributedConfig, Equality, RunConfig, TrainConfig
from lanewise.engine import build_engine
from lanewise.testing import run_distributed
from lanewise.world.determinism import set_determinism
from lanewise.world.world import World

MNIST = Path(__file__).parents[1] / "examples" / "mnist"
ROUNDS, STEPS_PER_ROUND = 25, 20
LANES, MICRO_BATCH_SIZE = 4, 16


def main() -> None:
    """Print one line for each grade and number of processes."""
    for world_size in (1, 2):
        for equality in get_args(Equality):
            # Rank 0's times: in every step all ranks wait for each other.
            ratios, step_seconds = run_distributed(compare, world_size, equality, timeout_seconds=600)[0]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{world_size} process(es), {equality}: {middle:.2f} of the hand-written time "
                f"({low:.2f} to {high:.2f}), {step_seconds * 1e3:.1f} ms a step, "
                f"{LANES * MICRO_BATCH_SIZE / step_seconds:,.0f} samples/s"
            )


def compare(world: World, equality: Equality) -> tuple[list[float], float]:
    """Return the ratio of times in each round, and the median time of lanewise's step in seconds."""
    sys.path.insert(0, str(MNIST))
    set_determinism(equality, threads=1)
    config = RunConfig(
        task=ClassConfig(class_path="mnist.Mnist"),
        batch=BatchConfig(global_batch_size=LANES * MICRO_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE),
        train=TrainConfig(run_dir="unused", max_steps=(ROUNDS + 2) * STEPS_PER_ROUND),
        optimizer=ClassConfig(class_path="torch.optim.AdamW", init_args={"lr": 1e-3}),
        distributed=DistributedConfig(equality=equality),
    )
    steps = build_engine(config, world).steps()
    hand_written = hand_written_steps(world)
    own, other = [], []
    for _ in range(ROUNDS + 1):
        own.append(seconds(lambda: next(steps)))
        other.append(seconds(lambda: next(hand_written)))
    own, other = own[1:], other[1:]  # the first round warms up
    ratios = [one / two for one, two in zip(own, other, strict=True)]
    return ratios, statistics.median(own) / STEPS_PER_ROUND


def seconds(step: Callable[[], object]) -> float:
    """Time one round."""
    start = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        step()
    return time.perf_counter() - start


def hand_written_steps(world: World) -> Iterator[None]:
    """Train as a careful user would by hand; one item for each optimizer step."""
    from mnist import Mnist

    task = Mnist()
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = task.train_dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, world.world_size, world.rank, drop_last=True
    )
    loader = DataLoader(dataset, MICRO_BATCH_SIZE, sampler=sampler, drop_last=True)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if world.world_size > 1 else None
    accumulation = LANES // world.world_size
    index = 0
    while True:
        for images, labels in loader:
            is_last = (index + 1) % accumulation == 0
            with nullcontext() if ddp is None or is_last else ddp.no_sync():
                logits = (ddp or model)(images)
                (nn.functional.cross_entropy(logits, labels) / accumulation).backward()
            index += 1
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                yield


if __name__ == "__main__":
    main()
