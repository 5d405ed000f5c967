"""A GPT on one device, by hand and by lanewise, in turns in one process.

    python benchmarks/large_gpt.py DEVICE SIZE MICRO_BATCH_SIZE SECONDS [--trace]

DEVICE is `cuda` or `cpu`, SIZE one of `SIZES`. A round gives each side a turn, and ratios are made within
rounds. A step has four micro-batches; the loss is part of the compiled model; the gradient is clipped.
`by hand` is a loop without a loader, with the fused AdamW; `by hand, deterministic` is the same under torch's
deterministic algorithms, with the AdamW that `exact` has. The second over the first is what torch's
determinism costs, and `exact` over the second what lanewise adds to it. Prints JSON: a line for each side,
with `--trace` another with its kernels, and last what a save costs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from section import ratios
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from lanewise import Loss, Task
from lanewise.commands.bench.rounds import MiddleHalf, take_turns
from lanewise.config import Equality, RunConfig
from lanewise.config.check import read_section
from lanewise.engine.engine import build_engine
from lanewise.engine.state.run_state import take_optimizer
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.device.peak import peak_flops_per_second
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_gpt"))
from char_gpt import GPT, GPTConfig

NUM_LANES = 4
"""Micro-batches of a step."""
LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1.0
WIDEST = 0.02
"""The widest middle half of ratios that is published, as a part of the median."""
NUM_ROUNDS = 8


class Size(NamedTuple):
    """Sizes of the model."""

    model: GPTConfig
    vocabulary: int


SIZES = {
    "124M": Size(GPTConfig(num_layers=12, num_heads=12, width=768, context=1024, dropout=0.0), 50304),
    "350M": Size(GPTConfig(num_layers=24, num_heads=16, width=1024, context=1024, dropout=0.0), 50304),
    # Of examples/char_gpt, whose kernels are so short that a device waits for the host.
    "char": Size(GPTConfig(num_layers=4, num_heads=4, width=128, context=64, dropout=0.1), 128),
    "tiny": Size(GPTConfig(num_layers=2, num_heads=2, width=32, context=32, dropout=0.0), 128),
}


class GPTWithLoss(GPT):
    """Returns the sum of the losses, so that what compiles the model compiles the loss too."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict each token of a batch of shape (samples, context + 1) from those before it."""
        logits = super().forward(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


class LargeGPT(Task):
    """Predicts random tokens.

    Args:
        size: one of `SIZES`.
    """

    def __init__(self, size: str) -> None:
        self.size = SIZES[size]

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return GPTWithLoss(self.size.model, self.size.vocabulary)

    def train_dataset(self) -> TensorDataset:
        """See `Task`."""
        generator = torch.Generator().manual_seed(0)
        shape = (8192, self.size.model.context + 1)
        return TensorDataset(torch.randint(self.size.vocabulary, shape, generator=generator))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """See `Task`."""
        loss: torch.Tensor = model(batch[0])
        return loss

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        """See `Task`."""
        return Loss(outputs, batch[0].numel() - len(batch[0]))


class Side(NamedTuple):
    """A way to train."""

    step: Callable[[], object]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    is_deterministic: bool


class Turn(NamedTuple):
    """What came of a turn, in seconds for each step."""

    seconds: float
    issued: float
    """Until the host had said all of it."""
    host: float
    """Of the CPU, in the thread that says it."""


def by_hand(device: torch.device, size: str, micro_batch_size: int, *, is_deterministic: bool) -> Side:
    """Build a loop without lanewise."""
    torch.manual_seed(0)
    task = LargeGPT(size)
    model = task.build_model().to(device)
    is_fused = device.type != "cpu" and not is_deterministic
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=is_fused, foreach=not is_fused)
    compiled = torch.compile(model)
    batches = micro_batches(task, device, micro_batch_size)
    num_tokens = micro_batch_size * task.size.model.context

    def step() -> None:
        for _ in range(NUM_LANES):
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(next(batches))
            (loss / (num_tokens * NUM_LANES)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Side(step, model, optimizer, is_deterministic)


def micro_batches(task: LargeGPT, device: torch.device, micro_batch_size: int) -> Iterator[torch.Tensor]:
    """Yield micro-batches on the device, copied from pinned memory, without a DataLoader."""
    tokens = task.train_dataset().tensors[0]
    if device.type != "cpu":
        tokens = tokens.pin_memory()
    while True:
        for micro_batch in tokens.split(micro_batch_size):
            if len(micro_batch) == micro_batch_size:
                yield micro_batch.to(device, non_blocking=True)


def by_lanewise(device: torch.device, size: str, micro_batch_size: int, equality: Equality) -> Side:
    """Build the engine that `lanewise train` has."""
    set_determinism(equality, torch.get_num_threads())
    config = read_section(RunConfig, configured(device.type, size, micro_batch_size, equality))
    engine = build_engine(config, LocalWorld(device), LargeGPT(size))
    steps = engine.steps()
    training = engine.training
    return Side(lambda: next(steps), training.model, training.optimizer, equality == "exact")


def configured(device_type: str, size: str, micro_batch_size: int, equality: Equality) -> dict[str, Any]:
    """Return the configuration of a run."""
    return {
        "task": {"class_path": "large_gpt.LargeGPT", "init_args": {"size": size}},
        "batch": {"global_batch_size": NUM_LANES * micro_batch_size, "micro_batch_size": micro_batch_size},
        "train": {"max_steps": 1_000_000, "run_dir": "unused", "max_grad_norm": MAX_GRAD_NORM},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": LEARNING_RATE}},
        "precision": "bf16",
        "compile": "whole",
        "log": {"every_steps": 1000},
        "distributed": {"device_type": device_type, "equality": equality},
    }


def take_turn(side: Side, num_steps: int, device: torch.device) -> Turn:
    """Take steps, between which only other steps of this side happen."""
    torch.use_deterministic_algorithms(side.is_deterministic)
    synchronize(device)
    start, host = time.perf_counter(), time.thread_time()
    for _ in range(num_steps):
        side.step()
    issued, host = time.perf_counter() - start, time.thread_time() - host
    synchronize(device)
    return Turn(*(one / num_steps for one in (time.perf_counter() - start, issued, host)))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(sides: Mapping[str, Side], device: torch.device, seconds: float) -> dict[str, list[Turn]]:
    """Let the sides take turns for so many seconds in all; return the turns of each."""
    turn_seconds = seconds / (NUM_ROUNDS * len(sides))
    num_steps = {
        name: max(2, round(turn_seconds / take_turn(side, 3, device).seconds)) for name, side in sides.items()
    }
    turns = {
        name: lambda side=side, name=name: take_turn(side, num_steps[name], device)
        for name, side in sides.items()
    }
    rounds = list(islice(take_turns(turns), NUM_ROUNDS))
    return {name: [one[name] for one in rounds] for name in sides}


def flops_per_token(size: Size, num_parameters: int) -> int:
    """Count what a token's forward and backward multiply and add, as in PaLM (arXiv 2204.02311, appendix B).

    6 for each weight but those of the positions, and 12 x layers x width x context for attention, as if it
    were not causal.
    """
    model = size.model
    weights = num_parameters - model.context * model.width
    return 6 * weights + 12 * model.num_layers * model.width * model.context


def describe(
    turns: Mapping[str, list[Turn]],
    sides: Mapping[str, Side],
    size: Size,
    micro_batch_size: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each side."""
    peak = peak_flops_per_second(torch.cuda.get_device_name(), "bf16") if device.type == "cuda" else None
    tokens = NUM_LANES * micro_batch_size * size.model.context
    base = [one.seconds for one in next(iter(turns.values()))]
    for name, taken in turns.items():
        seconds = statistics.median(one.seconds for one in taken)
        ratio = MiddleHalf.of(ratios([one.seconds for one in taken], base))
        flops = flops_per_token(size, sum(one.numel() for one in sides[name].model.parameters()))
        yield {
            "side": name,
            "milliseconds": seconds * 1e3,
            "ratio": ratio,
            "is_steady": ratio.width <= WIDEST,
            "issued_milliseconds": statistics.median(one.issued for one in taken) * 1e3,
            "host_milliseconds": statistics.median(one.host for one in taken) * 1e3,
            "tokens_per_second": tokens / seconds,
            "utilization": None if peak is None else flops * tokens / seconds / peak,
        }


def trace(side: Side, device: torch.device) -> dict[str, Any]:
    """Profile three steps; return which part of the time the device computed, and its largest kernels."""
    accelerator = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, *accelerator]) as profiler:
            take_turn(side, 3, device)
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted(
        (event["ts"], event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    spent: dict[str, float] = defaultdict(float)
    waited, end = 0.0, kernels[0][0] if kernels else 0.0
    for start, duration, kernel in kernels:
        spent[kernel[:70]] += duration / 3e3
        waited += max(0.0, start - end)
        end = max(end, start + duration)
    span = end - kernels[0][0] if kernels else 0.0
    largest = sorted(spent.items(), key=lambda one: -one[1])[:5]
    return {
        "kernels": len(kernels) / 3,
        "busy": (span - waited) / span if span else None,
        "largest_milliseconds": largest,
    }


def measure_saves(side: Side, device: torch.device) -> dict[str, float]:
    """Return for how long a save stops the loop, and how long it is then written, in seconds."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in side.model.named_parameters()}
    stopped, written = [], []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(CheckpointFolder(Path(folder)), LocalWorld(device), keep_last=1, keep_best=0, sign=1)
        for number in range(4):
            synchronize(device)
            start = time.perf_counter()
            state = {"model": side.model.state_dict(), "optimizer": take_optimizer(side.optimizer, names)}
            saver.save(state, Manifest(step=number, metric=None, identity={}, files=()))
            stopped.append(time.perf_counter() - start)
            saver.finish()
            written.append(time.perf_counter() - start)
    # The first save takes the memory for the copy.
    return {"stopped_seconds": statistics.median(stopped[1:]), "written_seconds": statistics.median(written)}


def main() -> None:
    """Train all sides in turns, save, and print what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("micro_batch_size", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product, for `exact`
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    sizes = options.size, options.micro_batch_size
    sides: dict[str, Side] = {}
    # `exact` comes last: it also fixes what compilers choose, for the whole process.
    builds: dict[str, Callable[[], Side]] = {
        "by hand": lambda: by_hand(device, *sizes, is_deterministic=False),
        "by hand, deterministic": lambda: by_hand(device, *sizes, is_deterministic=True),
        "close": lambda: by_lanewise(device, *sizes, "close"),
        "exact": lambda: by_lanewise(device, *sizes, "exact"),
    }
    for name, build in builds.items():
        torch.use_deterministic_algorithms(False)
        sides[name] = build()
        take_turn(sides[name], 3, device)  # compiles
    turns = measure(sides, device, options.seconds)
    for row in describe(turns, sides, SIZES[options.size], options.micro_batch_size, device):
        print(json.dumps(row), flush=True)
    if options.trace:
        for name, side in sides.items():
            print(json.dumps({"traced": name} | trace(side, device)), flush=True)
    print(json.dumps(measure_saves(sides["by hand"], device)), flush=True)


if __name__ == "__main__":
    main()
