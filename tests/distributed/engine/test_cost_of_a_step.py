"""What a steady step does besides the model, counted, so that no noise hides what makes it slower."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

import lanewise
from lanewise import Task
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure
from tests.slow import slow

OWN_FILES = str(Path(lanewise.__file__).parent)
WARM_STEPS, STEPS = 5, 4
COLUMNS = ("calls", "operators", "collectives", "meetings", "bytes")


class Ready(Dataset[Any]):
    """Micro-batches that lie in memory."""

    def __init__(self) -> None:
        self.batch = torch.ones(2, 16), torch.arange(2)

    def __len__(self) -> int:
        return 2**20

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.batch]


class Tiny(Task):
    """Next to no work."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def train_dataset(self) -> Dataset[Any]:
        return Ready()

    def collate(self, samples: list[Any]) -> Any:
        return samples[0]

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])


class Normed(Tiny):
    """With six buffers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.BatchNorm1d(32), nn.Linear(32, 4))


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def cost(
    world: World, task: type[Task], equality: str, num_lanes: int, most: tuple[int, ...]
) -> dict[str, float]:
    """Return the least that a steady step does, of as many rounds as it takes to be at most `most`, or of 16.

    Over gloo a thread tells that a collective ended, at any moment: a round may count a call, or a few
    hundred bytes, that belong to the one before, on a busy machine most rounds. One process alone counts the
    same in each.
    """
    set_determinism(equality, threads=1)
    config = configure(
        task,
        num_lanes=num_lanes,
        steps=300,
        equality=equality,
        optimizer="torch.optim.SGD",
        log_every_steps=1000,
    )
    steps = build_engine(config, world).steps()
    for _ in range(WARM_STEPS):
        next(steps)
    least = dict.fromkeys(COLUMNS, float("inf"))
    for _ in range(2 if world.world_size == 1 else 16):
        counted = count(steps, world)
        least = {name: min(least[name], counted[name]) for name in COLUMNS}
        if all(world.all_gather_tree(over(least, most) == {})):
            break
    return least


def over(counted: dict[str, float], most: tuple[int, ...]) -> dict[str, float]:
    """Return what is more than it may be."""
    return {name: counted[name] for name, limit in zip(COLUMNS, most, strict=True) if counted[name] > limit}


def count(steps: Iterator[Any], world: World) -> dict[str, float]:
    """Count what each of the next steps does on average."""
    calls = 0

    def call(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(OWN_FILES)

    num_collectives, num_meetings = world.num_collectives(), meetings(world)
    sys.setprofile(call)
    for _ in range(STEPS):
        next(steps)
    sys.setprofile(None)
    num_collectives = world.num_collectives() - num_collectives
    num_meetings = meetings(world) - num_meetings
    operators = Operators()
    with operators:
        for _ in range(STEPS):
            next(steps)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for _ in range(STEPS):
            next(steps)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiled.key_averages())
    total = calls, operators.counts.total(), num_collectives, num_meetings, allocated
    return {name: number // STEPS for name, number in zip(COLUMNS, total, strict=True)}


def enter(world: World) -> tuple[int, int]:
    """Return how many functions of ours, in how many files, a steady step enters."""
    set_determinism("close", threads=1)
    config = configure(
        Tiny, num_lanes=4, steps=200, equality="close", optimizer="torch.optim.SGD", log_every_steps=1000
    )
    steps = build_engine(config, world).steps()
    for _ in range(WARM_STEPS):
        next(steps)
    functions: set[tuple[str, str]] = set()

    def call(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN_FILES):
            functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(call)
    next(steps)
    sys.setprofile(None)
    return len(functions), len({file for file, _ in functions})


def meetings(world: World) -> int:
    """Count the meetings in shared memory."""
    return 0 if world.shared_memory is None else world.shared_memory._num_barriers


@pytest.mark.parametrize(
    ("task", "world_size", "one_machine", "equality", "num_lanes", "most"),
    [
        (Tiny, 1, True, "close", 1, (54, 39, 0, 0, 3864)),
        (Tiny, 1, True, "close", 4, (123, 139, 0, 0, 15472)),
        (Tiny, 1, True, "exact", 4, (138, 142, 0, 0, 15472)),
        (Tiny, 2, True, "close", 4, (121, 108, 0, 1, 13396)),
        (Tiny, 2, False, "exact", 4, (121, 102, 3, 0, 8308)),
        (Normed, 1, True, "close", 4, (326, 253, 0, 0, 42772)),
        *slow(
            (Tiny, 2, True, "exact", 4, (140, 121, 0, 1, 13396)),
            (Tiny, 2, False, "close", 4, (102, 90, 2, 0, 8308)),
            (Normed, 2, True, "close", 4, (262, 227, 0, 2, 35220)),
        ),
    ],
)
def test_a_step_costs_no_more_than_before(task, world_size, one_machine, equality, num_lanes, most):
    """Lower the numbers with what becomes cheaper, and raise them only for what is worth it."""
    options = task, equality, num_lanes, most
    for counted in run_distributed(cost, world_size, *options, one_machine=one_machine):
        assert over(counted, most) == {}


def test_who_reads_a_step_reads_no_more_files_than_before():
    """It was 74 functions in 24 files. Lower the numbers with what becomes plainer."""
    ((num_functions, num_files),) = run_distributed(enter, 1)
    assert num_functions <= 45
    assert num_files <= 16
