"""Everything that may change state, and every kind of state: what verify says of each."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, default_collate

from lanewise import Task
from lanewise.commands.verify import verify as module
from lanewise.commands.verify.job import VerifyJob
from lanewise.config import (
    BatchConfig,
    ClassConfig,
    DistributedConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    TrainConfig,
)
from lanewise.errors import TaskError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld
from tests.distributed import kinds, tasks

PLACES = ("forward", "loss", "backward", "collate", "dataset", "optimizer", "scheduler")
STATES = ("attribute", "buffer", "parameter", "generator")


class Rows(Dataset[Any]):
    def __init__(self, task: "Changing") -> None:
        self.task = task
        self.rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] * self.task.factor("dataset")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("level", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows)


class Changing(Task):
    """Changes one kind of state in one place, and uses it there."""

    def __init__(self, place: str, state: str) -> None:
        self.place, self.state = place, state
        self.calls = 0
        self.rng = random.Random(7) if state == "generator" else None
        CURRENT[:] = [self]

    def factor(self, place: str) -> float:
        if place != self.place:
            return 1.0
        with torch.no_grad():
            match self.state:
                case "attribute":
                    self.calls += 1
                    return 1 + self.calls / 64
                case "buffer":
                    return 1 + float(self.model.level.add_(1 / 64))
                case "parameter":
                    return 1 + float(self.model.scale.add_(1 / 64))
        assert self.rng is not None
        return 1 + self.rng.random()

    def build_model(self) -> nn.Module:
        self.model = Scaled()
        return self.model

    def train_dataset(self) -> Dataset[Any]:
        return Rows(self)

    def collate(self, samples: list[Any]) -> torch.Tensor:
        return default_collate(samples) * self.factor("collate")

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        outputs = model(batch) * (self.factor("forward") if model.training else 1)
        if outputs.requires_grad and self.place == "backward":
            outputs.register_hook(lambda gradient: gradient * self.factor("backward"))
        return outputs

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (outputs - batch).square().mean() * (self.factor("loss") if outputs.requires_grad else 1)


CURRENT: list[Changing] = []


class Steps(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        factor = CURRENT[0].factor("optimizer")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        super().step()


class Rates(LRScheduler):
    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * CURRENT[0].factor("scheduler") for rate in self.base_lrs]


READ = "a sample differs from read to read"
COLLATED = "a micro-batch differs from read to read"
HIDDEN = "state outside of parameters and buffers"
UNSEEDED = "random numbers from a generator that lanewise does not seed"
OUTSIDE = "a parameter is changed outside of the optimizer"
NOT_SAVED = "state that a checkpoint does not hold"
SAYS = {
    ("forward", "attribute"): (HIDDEN, "task.calls"),
    ("forward", "parameter"): (OUTSIDE, "scale"),
    ("forward", "generator"): (UNSEEDED, "task.rng (a generator)"),
    ("loss", "attribute"): (HIDDEN, "task.calls"),
    ("loss", "parameter"): (OUTSIDE, "scale"),
    ("loss", "generator"): (UNSEEDED, "task.rng (a generator)"),
    ("backward", "attribute"): (HIDDEN, "task.calls"),
    ("backward", "parameter"): (OUTSIDE, "scale"),
    ("backward", "generator"): (UNSEEDED, "task.rng (a generator)"),
    ("collate", "attribute"): (COLLATED, "task.calls"),
    ("collate", "buffer"): (COLLATED, ""),
    ("collate", "generator"): (COLLATED, "task.rng (a generator)"),
    ("dataset", "attribute"): (READ, "task.calls"),
    ("dataset", "buffer"): (READ, ""),
    ("dataset", "generator"): (READ, "task.rng (a generator)"),
    ("optimizer", "attribute"): (NOT_SAVED, "CURRENT.0.calls"),
    ("optimizer", "generator"): (UNSEEDED, "CURRENT.0.rng (a generator)"),
    ("scheduler", "attribute"): (NOT_SAVED, "the checkpoint did not bring back task.calls"),
    ("scheduler", "generator"): (NOT_SAVED, "the checkpoint did not bring back task.rng (a generator)"),
}
"""The finding and what names the state; nothing is found where it is right: a lane's buffer is merged, or put
back after a backward, and what an optimizer or a scheduler changes in the model is saved with it."""


def configure(place: str, state: str) -> RunConfig:
    return RunConfig(
        task=ClassConfig(class_path=f"{__name__}.Changing", init_args={"place": place, "state": state}),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(epochs=2, run_dir="never-made"),
        optimizer=OptimizerConfig(class_path=f"{__name__}.Steps", init_args={"lr": 0.1}),
        scheduler=SchedulerConfig(class_path=f"{__name__}.Rates"),
        distributed=DistributedConfig(device_type="cpu", equality="exact"),
    )


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def run(job: VerifyJob, *, is_fresh: bool) -> Any:
        assert is_fresh
        return job.run(LocalWorld(torch.device("cpu")))

    monkeypatch.setattr(module, "start", run)
    monkeypatch.setattr(module, "prepare_workers", lambda *_: None)
    threads = torch.get_num_threads()
    set_determinism("exact", 1)
    yield
    set_determinism("close", threads)
    torch.use_deterministic_algorithms(False)


REFUSED = {("collate", "parameter"), ("dataset", "parameter")}
"""What training refuses itself, as it happens between the lanes of a step."""
KINDS = [
    pytest.param(place, state, marks=() if (row + column) % len(STATES) == 0 else pytest.mark.slow)
    for row, place in enumerate(PLACES)
    for column, state in enumerate(STATES)
]


@pytest.mark.parametrize(("place", "state"), KINDS)
def test_state_that_something_changes_is_named_or_right(place, state):
    if (place, state) in REFUSED:
        with pytest.raises(TaskError, match="parameter scale changed"):
            module.verify(configure(place, state), [1], num_steps=3, resumes=True)
        return
    report = module.verify(configure(place, state), [1], num_steps=3, resumes=True)
    if (place, state) not in SAYS:
        assert (report.is_verified, list(report.findings)) == (True, [])
        return
    cause, name = SAYS[place, state]
    (evidence,) = [finding.evidence for finding in report.findings if finding.cause == cause]
    assert name in evidence


UPDATED = "what a task does before or after an update depends on more than the step"
KEPT_BY_ALL = {
    kinds.CountInUpdate: (NOT_SAVED, "the checkpoint did not bring back model.updates"),
    kinds.TeacherOfUpdate: (NOT_SAVED, "the checkpoint did not bring back task.teacher.weight"),
    kinds.AnnealedDropout: (NOT_SAVED, "the checkpoint did not bring back model.student.0.p"),
    kinds.SmoothedLabels: (NOT_SAVED, "the checkpoint did not bring back task.criterion.label_smoothing"),
    kinds.PatienceOfUpdate: (UPDATED, "student.weight"),
    kinds.LateCountInUpdate: (UPDATED, "teacher.weight"),
    kinds.QueueInLoss: (HIDDEN, "task.queue"),
}
"""What every process keeps alike trains the same model on any number, but no checkpoint has it."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind is kinds.CountInUpdate else pytest.mark.slow)
        for kind in KEPT_BY_ALL
    ],
)
def test_what_every_process_keeps_alike_is_named(kind):
    config = tasks.configure(kind, num_lanes=4, steps=6, optimizer="torch.optim.SGD", lr=0.1)
    config = replace(config, distributed=DistributedConfig(device_type="cpu", equality="exact"))
    report = module.verify(config, [1], num_steps=3, resumes=True)
    cause, name = KEPT_BY_ALL[kind]
    assert name in "".join(finding.evidence for finding in report.findings if finding.cause == cause)
