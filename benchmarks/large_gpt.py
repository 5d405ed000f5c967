"""A GPT of 124 million parameters: as a task of lanewise, and in a compiled loop written by hand.

    python benchmarks/large_gpt.py DEVICE SIZE SECONDS

runs the loop on one device, then saves, and prints how fast it was and how long a save stopped it, as JSON.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lanewise import Loss, Task
from lanewise.engine.state.run_state import take_optimizer
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_gpt"))
from char_gpt import GPT, GPTConfig

NUM_LANES = 4
"""Micro-batches of a step."""
LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1.0


class Size(NamedTuple):
    """Sizes of the model, and of a micro-batch."""

    model: GPTConfig
    vocabulary: int
    micro_batch_size: int


SIZES = {
    "124M": Size(GPTConfig(num_layers=12, num_heads=12, width=768, context=1024, dropout=0.0), 50304, 8),
    "tiny": Size(GPTConfig(num_layers=2, num_heads=2, width=32, context=32, dropout=0.0), 128, 2),
}


class LargeGPT(Task):
    """Predicts random tokens.

    Args:
        size: one of `SIZES`.
    """

    def __init__(self, size: str) -> None:
        self.size = SIZES[size]

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return GPT(self.size.model, self.size.vocabulary)

    def train_dataset(self) -> TensorDataset:
        """See `Task`."""
        generator = torch.Generator().manual_seed(0)
        shape = (1024, self.size.model.context + 1)
        return TensorDataset(torch.randint(self.size.vocabulary, shape, generator=generator))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """See `Task`."""
        logits: torch.Tensor = model(batch[0][:, :-1])
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        """See `Task`."""
        targets = batch[0][:, 1:].flatten()
        return Loss(F.cross_entropy(outputs.flatten(0, 1), targets, reduction="sum"), len(targets))


def micro_batches(task: LargeGPT, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield micro-batches on the device, copied from pinned memory, without a DataLoader."""
    tokens = task.train_dataset().tensors[0]
    if device.type != "cpu":
        tokens = tokens.pin_memory()
    while True:
        for micro_batch in tokens.split(task.size.micro_batch_size):
            yield micro_batch.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def main(device: torch.device, size: str, seconds: float) -> None:
    """Train by hand, save, and print what was measured."""
    torch.manual_seed(0)
    task = LargeGPT(size)
    model = task.build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    compiled = torch.compile(model)
    batches = micro_batches(task, device)

    def step() -> None:
        for _ in range(NUM_LANES):
            batch = next(batches)
            with torch.autocast(device.type, torch.bfloat16):
                logits = compiled(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / NUM_LANES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def seconds_of(num_steps: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize(device)
        return time.perf_counter() - start

    seconds_of(3)  # compiles
    num_steps = max(1, round(seconds / 5 / seconds_of(1)))
    spent = statistics.median(seconds_of(num_steps) for _ in range(5))
    samples = num_steps * NUM_LANES * task.size.micro_batch_size
    print(json.dumps({"samples_per_second": samples / spent} | measure_saves(model, optimizer, device)))


def measure_saves(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, float]:
    """Return for how long a save stops the loop, and how long it is then written, in seconds."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    stopped, written = [], []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(CheckpointFolder(Path(folder)), LocalWorld(device), keep_last=1, keep_best=0, sign=1)
        for number in range(4):
            synchronize(device)
            start = time.perf_counter()
            state = {"model": model.state_dict(), "optimizer": take_optimizer(optimizer, names)}
            saver.save(state, Manifest(step=number, metric=None, identity={}, files=()))
            stopped.append(time.perf_counter() - start)
            saver.finish()
            written.append(time.perf_counter() - start)
    # The first save takes the memory for the copy.
    return {"stopped_seconds": statistics.median(stopped[1:]), "written_seconds": statistics.median(written)}


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
