"""A loss of all samples of a step: its memory and time, against one graph and a hand-written gather.

    python benchmarks/batch_loss.py

The ConvNet and the loss of examples/contrastive, on views that lie ready in memory, with AdamW and one thread
for each process. `loss` is that of a lane's own views, as in gradient accumulation.

The first table is one step of 4,096 digits, two views each, in 64 lanes of 64 on one process: what a process
of its own needed at its peak beyond what it had after a step of 128 digits, and the most bytes of tensors
that were alive at once. The matrix of all similarities has 256 MiB; `row_loss` has a lane's rows of it.

The second is a step of 256 digits in 8 lanes of 32 on one process, in CPU time. "Accumulation" is a loop by
hand over the lanes, each with the loss of its own views; "a forward" is one more forward of each lane without
a graph, and "the loss" what the loss of all views and its gradient for the embeddings take by hand.

The third is a step of 256 digits on two processes with one lane each, in seconds of the clock. By hand each
process gathers the embeddings by `torch.distributed.nn.all_gather` and computes the loss of all, and DDP
takes the mean. In the last two tables the sides take turns in the same processes.
"""

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from section import publish, ratios, spread, table
from torch import nn
from torch.distributed.nn import functional as with_gradient
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from lanewise import Task
from lanewise.config import RunConfig
from lanewise.config.check import read_section
from lanewise.engine.engine import build_engine
from lanewise.processes.device.live_storage import LiveStorage
from lanewise.testing import run_distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "contrastive"))
from simclr import ConvNet, nt_xent

TEMPERATURE = 0.2
LARGE, LARGE_LANE = 4096, 64
GLOBAL, LANE = 256, 32

Views = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], None]


class Ready(Dataset[Views]):
    """Two views of each digit, which lie in memory: numbers at random, as nothing here looks at them."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._views = torch.rand(2, num_samples, 1, 28, 28, generator=generator)

    def __len__(self) -> int:
        return self._views.shape[1]

    def __getitems__(self, indices: Sequence[int]) -> list[Views]:
        """Return one micro-batch."""
        first, second = self._views[:, list(indices)]
        return [(first, second)]


class Lanewise(Task):
    """The model as a task."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return ConvNet(width=128)

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return Ready(self.num_samples)

    def collate(self, samples: list[Views]) -> Views:
        """See `Task`. The dataset hands out whole micro-batches."""
        return samples[0]

    def forward(self, model: nn.Module, batch: Views) -> Views:
        """See `Task`."""
        return embed(model, batch)


class ByLane(Lanewise):
    """Computes the loss of a lane's own views."""

    def loss(self, outputs: Views, batch: Views) -> torch.Tensor:
        """See `Task`."""
        return nt_xent(*outputs, TEMPERATURE)


class ByBatch(Lanewise):
    """Computes the loss of all views."""

    def batch_loss(self, model: nn.Module, outputs: Views, inputs: None) -> torch.Tensor:
        """See `Task`."""
        return nt_xent(*outputs, TEMPERATURE)


class ByRows(Lanewise):
    """Computes the loss of a lane's views among all."""

    def row_loss(self, model: nn.Module, outputs: Views, inputs: None, rows: slice) -> torch.Tensor:
        """See `Task`."""
        first, second = outputs
        numbers = torch.arange(len(first))[rows]
        own, partners = torch.cat([numbers, numbers + len(first)]), torch.cat([numbers + len(first), numbers])
        views = torch.cat([first, second])
        similarities = views[own] @ views.T / TEMPERATURE
        return F.cross_entropy(similarities.scatter(1, own[:, None], -torch.inf), partners)


def embed(model: nn.Module, batch: Views) -> Views:
    """Return the embeddings of both views."""
    first, second = model(torch.cat(batch)).chunk(2)
    return first, second


TASKS: dict[str, type[Lanewise]] = {"`loss`": ByLane, "`batch_loss`": ByBatch, "`row_loss`": ByRows}


def lanewise_step(world: Any, side: str, num_samples: int, micro_batch_size: int) -> Step:
    """Return what takes the next step of a run."""
    sections = {
        "task": {"class_path": "batch_loss.Lanewise", "init_args": {"num_samples": num_samples}},
        "batch": {"global_batch_size": num_samples, "micro_batch_size": micro_batch_size},
        "train": {"max_steps": 1_000_000, "run_dir": "run"},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        "distributed": {"device_type": "cpu"},
    }
    engine = build_engine(read_section(RunConfig, sections), world, TASKS[side](num_samples))
    steps = engine.steps()
    return lambda: deliver(steps)


def deliver(steps: Iterator[object]) -> None:
    """Take a step."""
    next(steps)


def step_by_hand(
    num_samples: int,
    compute: Callable[[nn.Module, Views], None],
    model: nn.Module,
    own: slice = slice(None),
) -> Step:
    """Return what reads a batch, or one's own part of it, computes a gradient, and updates."""
    optimizer, dataset = torch.optim.AdamW(model.parameters(), lr=1e-3), Ready(num_samples)

    def step() -> None:
        (batch,) = dataset.__getitems__(torch.randperm(num_samples)[own].tolist())
        optimizer.zero_grad()
        compute(model, batch)
        optimizer.step()

    return step


def one_graph(model: nn.Module, batch: Views) -> None:
    """Keep the graph of the whole batch."""
    nt_xent(*embed(model, batch), TEMPERATURE).backward()


def accumulation(model: nn.Module, batch: Views) -> None:
    """Add up the gradients of the lanes' own losses."""
    for lane in zip(*(views.split(LANE) for views in batch), strict=True):
        (nt_xent(*embed(model, lane), TEMPERATURE) * LANE / GLOBAL).backward()


@torch.no_grad()
def a_forward(model: nn.Module, batch: Views) -> None:
    """Run the forward of each lane, and no more."""
    for lane in zip(*(views.split(LANE) for views in batch), strict=True):
        embed(model, lane)


def peak_kib() -> int:
    """Return the largest amount of memory that this process has had."""
    (found,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found)


def large_step(world: Any, side: str, num_samples: int) -> Step:
    """Return a step of a side of the first table."""
    if side in TASKS:
        return lanewise_step(world, side, num_samples, LARGE_LANE)
    return step_by_hand(num_samples, one_graph, ConvNet(width=128))


def mebibytes(world: Any, side: str) -> tuple[float, float]:
    """Return the additional MiB of the process, and those of living tensors, in a process of its own."""
    large_step(world, side, 2 * LARGE_LANE)()  # loads what torch loads late
    step = large_step(world, side, LARGE)
    start = peak_kib()
    step()
    process = (peak_kib() - start) / 2**10
    with LiveStorage() as live:
        step()
    return process, live.peak_bytes / 2**20


def measure_memory() -> str:
    """Return the first table."""
    rows = []
    for side in ("one graph", *TASKS):
        ((process, tensors),) = run_distributed(mebibytes, 1, side)
        rows.append([side, f"{process:,.0f}", f"{tensors:,.0f}"])
    return table(["4,096 digits", "MiB of the process", "MiB of tensors"], rows)


def times_alone(world: Any, num_rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each side of the second table."""
    model = ConvNet(width=128)
    embedded = [F.normalize(torch.randn(GLOBAL, 64)).requires_grad_() for _ in range(2)]

    def the_loss() -> None:
        torch.autograd.grad(nt_xent(embedded[0], embedded[1], TEMPERATURE), embedded)

    (batch,) = Ready(GLOBAL).__getitems__(range(GLOBAL))
    sides: dict[str, Step] = {
        "accumulation": step_by_hand(GLOBAL, accumulation, model),
        "a forward": lambda: a_forward(model, batch),
        "the loss": the_loss,
        "one graph": step_by_hand(GLOBAL, one_graph, ConvNet(width=128)),
        **{side: lanewise_step(world, side, GLOBAL, LANE) for side in TASKS},
    }
    return take_turns(sides, num_rounds, time.process_time)


def take_turns(
    sides: dict[str, Step], num_rounds: int, clock: Callable[[], float], wait: Step = lambda: None
) -> dict[str, list[float]]:
    """Run each side in each round, after two that warm up."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(num_rounds + 2):
        for side, step in sides.items():
            wait()
            start = clock()
            step()
            times[side].append(clock() - start)
    return {side: taken[2:] for side, taken in times.items()}


def measure_alone(num_rounds: int) -> str:
    """Return the second table."""
    (times,) = run_distributed(times_alone, 1, num_rounds, timeout_seconds=3600)
    parts = zip(times["accumulation"], times["a forward"], times["the loss"], strict=True)
    bases = [
        (once, once + forward, ours + forward + loss)
        for (once, forward, loss), ours in zip(parts, times["`loss`"], strict=True)
    ]
    rows = []
    for side, taken in times.items():
        of_bases = [spread(ratios(taken, [base[number] for base in bases])) for number in range(3)]
        rows.append([side, spread([1e3 * one for one in taken], ".1f"), *of_bases])
    header = [
        "one process",
        "CPU ms",
        "/ accumulation",
        "/ (accumulation + a forward)",
        "/ (`loss` + a forward + the loss)",
    ]
    return table(header, rows)


def times_of_two(world: Any, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side of the third table. Collective."""
    torch.manual_seed(0)
    half = GLOBAL // 2
    own = slice(world.rank * half, (world.rank + 1) * half)

    def compute(model: nn.Module, batch: Views) -> None:
        embedded = embed(model, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch has another one for what is compiled
            first, second = (torch.cat(with_gradient.all_gather(one)) for one in embedded)
        nt_xent(first, second, TEMPERATURE).backward()

    sides = {
        "by hand": step_by_hand(GLOBAL, compute, DistributedDataParallel(ConvNet(width=128)), own),
        **{side: lanewise_step(world, side, GLOBAL, half) for side in TASKS},
    }
    return take_turns(sides, num_rounds, time.perf_counter, dist.barrier)


def measure_two(num_rounds: int) -> str:
    """Return the third table."""
    of_ranks = run_distributed(times_of_two, 2, num_rounds, timeout_seconds=3600)
    times = {
        side: [max(both) for both in zip(*(one[side] for one in of_ranks), strict=True)]
        for side in of_ranks[0]
    }
    rows = [
        [side, spread([1e3 * one for one in taken], ".1f"), spread(ratios(taken, times["by hand"]))]
        for side, taken in times.items()
    ]
    return table(["two processes", "ms", "/ by hand"], rows)


def measure(num_rounds: int) -> Iterator[str]:
    """Yield the three tables."""
    yield measure_memory()
    yield measure_alone(num_rounds)
    yield measure_two(num_rounds)


if __name__ == "__main__":
    publish("A loss of all samples of a step", __doc__, measure, num_rounds=41)
