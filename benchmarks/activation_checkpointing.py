"""Activation checkpointing: what it saves in memory, and costs in time.

    python benchmarks/activation_checkpointing.py

examples/char_gpt with 36 layers of width 128: forward and backward of 16 texts of 64 characters, one thread.
Memory is the most bytes of tensors that were alive at once, beside the weights and their gradients; where
layers run again it is near the inputs of all of them and what one saves, in the column "expected". "torch" is
torch's `checkpoint` around each layer, which puts back torch's generators alone. The first step of a run also
compares both runs of each layer. Times are CPU times of one process, in which the sides take turns.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from section import publish, ratios, spread, table
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lanewise import checkpoint_activations
from lanewise.engine.transforms import compare_runs
from lanewise.processes.device.live_storage import LiveStorage

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_gpt"))
from char_gpt import GPT, GPTConfig

NUM_LAYERS = 36
GROUP = 6
"""Layers of a larger block, in which they may be blocks themselves."""


class Group(nn.Sequential):
    """Some layers as one block."""


def build(num_layers: int, group: int = 1) -> GPT:
    """Return the model with so many layers, in blocks of so many."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=num_layers), vocabulary_size=65)
    layers = list(model.blocks.children())
    if group > 1:
        groups = (Group(*layers[first : first + group]) for first in range(0, num_layers, group))
        model.blocks = nn.Sequential(*groups)
    return model


def forward_and_backward(model: GPT, texts: torch.Tensor) -> None:
    """Compute the gradients of texts."""
    model.zero_grad(set_to_none=False)
    F.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()).backward()


def build_sides() -> dict[str, Callable[[], None]]:
    """Return a forward and backward of the same model for each side."""
    torch.set_num_threads(1)
    plain, texts = build(NUM_LAYERS), torch.randint(65, (16, 65))
    bare, later, first = (copy.deepcopy(plain) for _ in range(3))
    for layer in bare.get_submodule("blocks").children():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    checkpoint_activations(later)
    compare_runs([later], is_on=False)
    checkpoint_activations(first)
    models = {"without": plain, "torch": bare, "lanewise": later, "lanewise, in the first step": first}
    return {name: partial(forward_and_backward, model, texts) for name, model in models.items()}


def mebibytes(run: Callable[[], None]) -> float:
    """Return what was alive at the peak beside what is alive between the runs."""
    with LiveStorage() as live:
        run()
        left, _ = live.live_bytes, live.take_peak()
        run()
        return float(live.peak_bytes - left) / 2**20


def by_depth() -> Iterator[list[str]]:
    """Yield rows: what is kept with fewer layers, and with larger blocks."""
    texts = torch.randint(65, (16, 65))
    block = type(next(build(1).blocks.children())).__name__
    sides = {
        "without": (1, []),
        "each layer": (1, [block]),
        f"{GROUP} layers": (GROUP, ["Group"]),
        f"{GROUP} layers, and each in them": (GROUP, ["Group", block]),
    }
    for name, (group, blocks) in sides.items():
        kept = []
        for num_layers in (12, NUM_LAYERS):
            model = build(num_layers, group)
            if blocks:
                checkpoint_activations(model, blocks)
                compare_runs([model], is_on=False)
            kept.append(f"{mebibytes(partial(forward_and_backward, model, texts)):.0f}")
        yield [name, *kept]


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each side, and one of memory by depth."""
    sides = build_sides()
    memory = {name: mebibytes(run) for name, run in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, run in sides.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    kept = 16 * 64 * 128 * 4 / 2**20
    saved = (memory["without"] - kept) / NUM_LAYERS
    rows = [
        [
            name,
            f"{memory[name]:.0f}",
            f"{memory[name] if name == 'without' else NUM_LAYERS * kept + saved:.0f}",
            spread(ratios(times[name], times["without"])),
        ]
        for name in sides
    ]
    yield table(["", "MiB", "expected", "CPU time / without"], rows)
    yield table(["blocks", "MiB, 12 layers", f"MiB, {NUM_LAYERS} layers"], list(by_depth()))


if __name__ == "__main__":
    publish("Activation checkpointing", __doc__, measure, num_rounds=7)
