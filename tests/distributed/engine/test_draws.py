"""Whatever draws, and puts the state back or not: the same bytes on any number of processes."""

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from torchmetrics import Metric

from lanewise import Callback, Task
from lanewise.config import DataConfig, EvaluateConfig, OptimizerConfig, RunConfig, SchedulerConfig
from lanewise.engine.engine import build_engine
from lanewise.errors import DataError, TaskError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure, state_bytes

NUM_SAMPLES, NUM_LANES, STEPS, LATE_STEP = 48, 6, 4, 2
OWN = random.Random()  # of each process another one

KINDS: dict[str, tuple[Callable[[], Any], Callable[[], float], Callable[[Any], object]]] = {
    "torch": (torch.get_rng_state, lambda: torch.rand(()).item(), torch.set_rng_state),
    "numpy": (np.random.get_state, np.random.random_sample, np.random.set_state),
    "python": (random.getstate, random.random, random.setstate),
    "its own": (OWN.getstate, OWN.random, OWN.setstate),
}
PLACES = (
    "dataset",
    "collate",
    "worker",
    "forward",
    "loss",
    "backward hook",
    "optimizer",
    "optimizer's pre-hook",
    "optimizer's post-hook",
    "scheduler",
    "callback",
    "metric",
    "metric's compute",
    "evaluation",
)


@dataclass(frozen=True)
class Draw:
    """One place that draws."""

    place: str
    kind: str
    puts_back: bool
    """Whether the generator is left as it was, as code does that wants to leave no trace."""
    is_late: bool
    """Whether it draws only from a step on, and there in half of the lanes, if it belongs to a lane."""

    def factor(self, place: str, step: int, position: int = NUM_LANES) -> float:
        """Return what something is multiplied by in a place: 1, or one more than a number that is drawn."""
        if place != self.place or (self.is_late and (step < LATE_STEP or position < NUM_LANES)):
            return 1.0
        take, draw, put = KINDS[self.kind]
        state = take()
        number = draw()
        if self.puts_back:
            put(state)
        return 1.0 + number

    def factor_of(self, place: str, indices: torch.Tensor) -> float:
        """Do the same for a lane's samples, which come in the order of the dataset."""
        step, position = divmod(int(indices.max()), 2 * NUM_LANES)
        return self.factor(place, step, position)


class Points(Dataset[Any]):
    """Inputs of a regression, each with its number."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.inputs = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = torch.tensor(index)
        of_worker = (
            1.0 if torch.utils.data.get_worker_info() is None else self.draw.factor_of("worker", number)
        )
        return self.inputs[index] * self.draw.factor_of("dataset", number) * of_worker, number


class Total(Metric):
    """Adds up predictions; its parts may draw."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, indices: torch.Tensor) -> None:
        self.total += outputs.sum() * self.draw.factor_of("metric", indices)

    def compute(self) -> torch.Tensor:
        return self.total * self.draw.factor("metric's compute", LATE_STEP)


class Drawing(Task):
    """A linear regression in which one place draws."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_dataset(self) -> Dataset[Any]:
        return Points(self.draw)

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"test": Points(self.draw)}

    def collate(self, samples: Any) -> Any:
        inputs, indices = super().collate(samples)
        return inputs * self.draw.factor_of("collate", indices), indices

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, indices = batch
        outputs = model(inputs) * self.draw.factor_of("forward" if model.training else "evaluation", indices)
        if outputs.requires_grad:
            outputs.register_hook(lambda given: given * self.draw.factor_of("backward hook", indices))
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        inputs, indices = batch
        loss = F.mse_loss(outputs, inputs.sum(1, keepdim=True))
        return loss * self.draw.factor_of("loss", indices)

    def build_metrics(self) -> Mapping[str, Metric]:
        return {"total": Total(self.draw)}

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: torch.Tensor, batch: Any) -> None:
        metrics["total"].update(outputs, batch[1])


class Noisy(torch.optim.SGD):
    """An optimizer of a user's that draws in its step."""

    def __init__(self, params: Any, lr: float, draw: dict[str, Any]) -> None:
        super().__init__(params, lr=lr)
        self.draw, self.num_steps = Draw(**draw), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        factor = self.draw.factor("optimizer", self.num_steps)
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(factor)
        self.num_steps += 1


class Wandering(LRScheduler):
    """A learning rate that is drawn, at first when the scheduler is made."""

    def __init__(self, optimizer: torch.optim.Optimizer, draw: dict[str, Any]) -> None:
        self.draw = Draw(**draw)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        factor = self.draw.factor("scheduler", self.last_epoch)
        return [rate * factor for rate in self.base_lrs]


class Watching(Callback):
    """Draws on rank 0, where callbacks are, whenever it is called."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self.draw.factor("callback", step)

    def on_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self.draw.factor("callback", step)


def configure_draw(draw: Draw) -> RunConfig:
    """Return a run in which the place draws."""
    config = configure(Drawing, num_lanes=NUM_LANES, steps=STEPS, optimizer="torch.optim.SGD")
    if draw.place == "optimizer":
        noisy = OptimizerConfig(class_path=f"{__name__}.Noisy", init_args={"lr": 1e-2, "draw": asdict(draw)})
        config = replace(config, optimizer=noisy)
    if draw.place == "scheduler":
        wandering = SchedulerConfig(class_path=f"{__name__}.Wandering", init_args={"draw": asdict(draw)})
        config = replace(config, scheduler=wandering)
    return replace(
        config,
        data=DataConfig(order="sequential", num_workers=2 if draw.place == "worker" else 0),
        evaluate=EvaluateConfig(every_steps=STEPS if draw.place == "worker" else 2),
    )


@torch.no_grad()
def scale(optimizer: torch.optim.Optimizer, draw: Draw, step: int) -> None:
    factor = draw.factor(draw.place, step)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.mul_(factor)


def fit(world: World, draw: Draw, folder: str) -> tuple[dict[str, bytes], dict[str, float]]:
    """Train where a place draws; return the bytes of the weights, and what was evaluated."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(os.getpid())  # so that nothing is as in another process by chance
    # A callback can change nothing but what is drawn elsewhere.
    of_task = replace(draw, place="forward", is_late=False) if draw.place == "callback" else draw
    engine = build_engine(configure_draw(draw), world, Drawing(of_task))
    optimizer, steps = engine.training.optimizer, count()
    if draw.place == "optimizer's pre-hook":
        optimizer.register_step_pre_hook(lambda *_: scale(optimizer, draw, next(steps)))
    if draw.place == "optimizer's post-hook":
        optimizer.register_step_post_hook(lambda *_: scale(optimizer, draw, next(steps)))
    values = engine.fit(RunDir(Path(folder)), [Watching(draw)])
    return state_bytes(engine.training.model), values


def fit_all(world: World, draws: list[Draw], folder: str) -> list[Any]:
    set_determinism("exact", 1)
    results: list[Any] = []
    for draw in draws:
        try:
            results.append(fit(world, draw, folder))
        except DataError as error:  # a dataset of other samples on each rank
            results.append(str(error))
        except TaskError as error:
            results.append(REFUSED if REFUSED in str(error) else str(error))
    return results


def results_of(world_size: int, draws: list[Draw], folder: Path) -> dict[Draw, list[Any]]:
    """Train on so many processes; return what each of them has of each draw."""
    path = folder / str(world_size)
    path.mkdir()
    of_ranks = run_distributed(fit_all, world_size, draws, str(path))
    return {draw: list(results) for draw, *results in zip(draws, *of_ranks, strict=True)}


SEEDED = [kind for kind in KINDS if kind != "its own"]
SOME = [  # each place meets each kind and each of both options, and these meet one another
    Draw(place, kind, (number + choice) % 2 == 1, (number // 2 + (choice > 0)) % 2 == 1)
    for number, place in enumerate(PLACES)
    for choice, kind in enumerate(SEEDED)
]

FEW = SOME[::4] + SOME[10::12]
"""Each place once."""
PLANTED = [Draw(place, "its own", False, False) for place in PLACES if place != "callback"]
"""What each process draws for itself; a callback can change nothing."""
REFUSED = "changed in the forward, loss or backward of lanes"


@pytest.mark.parametrize(
    ("draws", "planted"),
    [(FEW, PLANTED[::3]), pytest.param(SOME, PLANTED, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_what_is_drawn_anywhere_is_the_same_on_two_processes_as_on_one(tmp_path, draws, planted):
    """In `make test` each place draws once."""
    alone, two = (results_of(world_size, draws + planted, tmp_path) for world_size in (1, 2))
    assert [draw for draw in draws if two[draw] != alone[draw] * 2] == []
    assert [draw for draw in planted if two[draw][0] == alone[draw][0] != REFUSED] == []  # seen everywhere


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_all_that_is_drawn_is_the_same_on_any_number_of_processes(tmp_path, place):
    draws = [Draw(place, *values) for values in product(SEEDED, (False, True), (False, True))]
    alone = results_of(1, draws, tmp_path)
    for world_size in (2, 3):
        results = results_of(world_size, draws, tmp_path)
        assert [draw for draw in draws if results[draw] != alone[draw] * world_size] == []
