"""Activation checkpointing: how many blocks run again together, against memory and time.

    python benchmarks/activation_checkpointing.py

examples/char_gpt with 36 layers of width 128: forward and backward of 16 texts of 64 characters, one thread.
Memory is the most bytes of tensors that were alive at once, beside the weights and their gradients. Where k
of n layers run again together it is near n / k inputs and what k layers save, in the column "expected". That
is least where k is near the square root of n * input / saved: a layer that saves 20 times its input, as here,
should run again alone. Times are CPU times of one process, in which the sides take turns.
"""

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from section import publish, ratios, spread, table
from torch.nn import functional as F

from lanewise import checkpoint_activations
from lanewise.world.live_storage import LiveStorage

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_gpt"))
from char_gpt import GPT, GPTConfig

NUM_LAYERS = 36
EVERY = (None, 1, 2, 3, 4, 6, 9, 12, 18, 36)


def build_sides() -> dict[int | None, Callable[[], None]]:
    """Return a forward and backward of the same model for each number of layers; None: without."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = GPT(GPTConfig(num_layers=NUM_LAYERS), vocabulary_size=65)
    texts = torch.randint(65, (16, 65))

    def side(model: GPT) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=False)
            F.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()).backward()

        return run

    models = {every: copy.deepcopy(plain) for every in EVERY}
    for every, model in models.items():
        if every is not None:
            checkpoint_activations(model, every=every)
    return {every: side(model) for every, model in models.items()}


def mebibytes(run: Callable[[], None]) -> float:
    """Return what was alive at the peak beside what is alive between the runs."""
    with LiveStorage() as live:
        run()
        left, _ = live.live_bytes, live.take_peak()
        run()
        return float(live.peak_bytes - left) / 2**20


def measure(num_rounds: int) -> str:
    """Return a row for each number of layers."""
    sides = build_sides()
    memory = {every: mebibytes(run) for every, run in sides.items()}
    times: dict[int | None, list[float]] = {every: [] for every in sides}
    for _ in range(num_rounds):
        for every, run in sides.items():
            start = time.process_time()
            run()
            times[every].append(time.process_time() - start)
    kept = 16 * 64 * 128 * 4 / 2**20
    saved = (memory[None] - kept) / NUM_LAYERS
    expected = {every: NUM_LAYERS / (every or 1) * kept + (every or 1) * saved for every in EVERY}
    rows = [
        [
            "without" if every is None else str(every),
            f"{memory[every]:.0f}",
            f"{expected[every] if every else memory[None]:.0f}",
            spread(ratios(times[every], times[None])),
        ]
        for every in sides
    ]
    return table(["every", "MiB", "expected", "CPU time / without"], rows)


if __name__ == "__main__":
    publish("Activation checkpointing", __doc__, measure, num_rounds=7)
