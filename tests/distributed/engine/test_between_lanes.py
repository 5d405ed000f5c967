"""What a lane, an optimizer or an evaluation leaves behind must not make replicas or layouts drift."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

from lanewise import Task
from lanewise.config import DataConfig, EvaluateConfig, RunConfig
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.run.build import build_model, build_run
from lanewise.engine.run.resume import resume_run
from lanewise.processes.device.determinism import set_determinism
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.model_file import load_model, save_model
from lanewise.runs.checkpoint.saver import Saver
from lanewise.runs.dir import RunDir
from tests.distributed.tasks import configure, state_bytes, train
from tests.slow import slow
from tests.unit.engine.own_loop.test_lanes import make_lanes
from tests.worlds import run_distributed

WORLDS = pytest.mark.parametrize("world_size", [*slow(2), 3])
NUM_LANES = 8


class Points(Task):
    """A linear model on 48 points."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch[1])


class Taught(nn.Module):
    """A student whose teacher is a moving average of it, in buffers that begin at the student's weights.

    Also counts in every other step, and normalizes by statistics that begin in the second step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(3, 1)
        self.register_buffer("teacher", self.student.weight.detach().clone())
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("turns", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("most", torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.teacher.lerp_(self.student.weight.detach(), 0.1)
        if self.steps % 2:
            self.turns += inputs.mean()
        inputs = F.batch_norm(inputs, self.mean, self.var, training=bool(self.steps > 0))
        self.most = torch.cat([self.most, inputs.detach().amax(0)])[-3:]
        self.steps += 1
        return self.student(inputs) + 0.1 * F.linear(inputs, self.teacher)


class Teaching(Points):
    def build_model(self) -> nn.Module:
        return Taught()


@WORLDS
def test_buffers_that_change_in_some_steps_only_are_the_same_on_any_number_of_processes(world_size):
    """They were an error in the second step, or silently that of each process."""
    config = configure(Teaching, num_lanes=NUM_LANES, steps=5)
    alone = run_distributed(train, 1, config)[0]
    for result in run_distributed(train, world_size, config):
        assert result == alone


class Norm(nn.BatchNorm1d):
    """Keeps its statistics in an evaluation too, as `track_running_stats` in training mode does."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        is_training, self.training = self.training, True
        try:
            return super().forward(given)
        finally:
            self.training = is_training


class Evaluated(Points):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), Norm(4), nn.Linear(4, 1))

    def eval_datasets(self) -> Any:
        return {"test": self.train_dataset()}


def fit(world, config: RunConfig, folder: str) -> tuple[dict[str, bytes], dict[str, float]]:
    set_determinism("exact", 1)
    engine = build_engine(config, world)
    Path(folder).mkdir(exist_ok=True)
    values = engine.fit(RunDir(Path(folder)))
    return state_bytes(engine.training.model), values


@WORLDS
def test_an_evaluation_leaves_no_mark_on_training(world_size, tmp_path):
    config = configure(Evaluated, num_lanes=NUM_LANES, steps=5)
    never = dataclasses.replace(config, evaluate=EvaluateConfig(every_steps=100))
    often = dataclasses.replace(config, evaluate=EvaluateConfig(every_steps=1))
    expected, _ = run_distributed(fit, 1, never, str(tmp_path / "never"))[0]
    alone = run_distributed(fit, 1, often, str(tmp_path / "alone"))[0]
    assert alone[0] == expected
    for result in run_distributed(fit, world_size, often, str(tmp_path / "often")):
        assert result == alone


class Langevin(torch.optim.SGD):
    """Adds noise to every update, as Langevin dynamics do (SGLD; Welling and Teh, ICML 2011)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter) + random.gauss(0, 1), alpha=1e-3)


@WORLDS
def test_an_optimizer_that_adds_noise_adds_the_same_on_every_rank(world_size):
    """The random state was that of a rank's last lane, so replicas drifted apart without a word."""
    config = configure(Points, num_lanes=NUM_LANES, steps=4, optimizer=f"{__name__}.Langevin")
    alone = run_distributed(train, 1, config)[0]
    for result in run_distributed(train, world_size, config):
        assert result == alone


def draw_after_steps(world) -> list[list[float]]:
    """Draw where the user's code stands: after the lanes of a step, and after an evaluation."""
    lanes = make_lanes(world)
    task = Points()
    model = lanes.prepare(task.build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = []
    for step in lanes.steps(task.train_dataset()):
        for batch in step:
            step.backward(task.loss(task.forward(model, batch), batch))
        optimizer.step()
        drawn.append([random.random(), np.random.rand(), torch.rand(()).item()])  # noqa: NPY002
        for _ in lanes.evaluate(task.train_dataset()):
            model(torch.randn(5, 3))  # in training mode
            random.random()
        drawn.append([random.random(), np.random.rand(), torch.rand(()).item()])  # noqa: NPY002
    drawn.append(model[1].running_mean.tolist())
    return drawn


@WORLDS
def test_what_an_own_loop_draws_after_a_step_is_the_same_on_every_rank(world_size):
    alone = run_distributed(draw_after_steps, 1)[0]
    assert len({str(numbers) for numbers in alone}) == len(alone)
    for drawn in run_distributed(draw_after_steps, world_size):
        assert drawn == alone


def go_on(world, config: RunConfig, folder: str, steps: int) -> Any:
    """Go on, take some steps and save; return the model, its average, and what a file of it gives."""
    set_determinism(config.distributed.equality, 1)
    run = build_run(config, world)
    first = resume_run(run, CheckpointFolder(Path(folder)), allow=())
    engine = Engine(dataclasses.replace(run, last_step=first + steps), first_step=first)
    for _ in engine.steps():
        pass
    training = engine.training
    saver = Saver(CheckpointFolder(Path(folder)), world, keep_last=9, keep_best=0, sign=1)
    saver.save(engine.run.state.take(), Manifest(first + steps, None, engine.run.identity, ()))
    saver.finish()
    save_model(training.evaluated_model, Path(folder).with_suffix(".safetensors"), world.rank)
    world.all_gather_tree(None)
    loaded = build_model(engine.run.runner.task, seed=1)
    load_model(loaded, Path(folder).with_suffix(".safetensors"))
    return state_bytes(training.model), state_bytes(training.evaluated_model), state_bytes(loaded)


def test_buffers_that_have_grown_are_averaged_saved_and_gone_on_with(tmp_path):
    config = configure(Teaching, num_lanes=NUM_LANES, steps=4)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, ema_decay=0.5))
    alone = run_distributed(go_on, 1, config, str(tmp_path / "alone"), 4)[0]
    assert alone[1] == alone[2]
    assert len(alone[1]["most"]) == 3 * 4
    run_distributed(go_on, 1, config, str(tmp_path / "stopped"), 2)
    for result in run_distributed(go_on, 2, config, str(tmp_path / "stopped"), 2):
        assert result == alone


@pytest.mark.parametrize("world_size", [*slow(1), 3])
def test_compressed_gradients_go_on_with_another_number_of_processes(tmp_path, world_size):
    """On one process nothing travels, so nothing is compressed."""
    config = configure(Points, num_lanes=NUM_LANES, steps=4, equality="close")
    distributed = dataclasses.replace(config.distributed, compression="bf16")
    config = dataclasses.replace(config, distributed=distributed)
    (straight, _, _), *_ = run_distributed(go_on, 2, config, str(tmp_path / "straight"), 4)
    run_distributed(go_on, 2, config, str(tmp_path / "stopped"), 2)
    results = run_distributed(go_on, world_size, config, str(tmp_path / "stopped"), 2)
    assert all(result == results[0] for result in results)
    for name, gone_on in results[0][0].items():
        if name.endswith(("weight", "bias")):
            np.testing.assert_allclose(
                np.frombuffer(gone_on, np.float32), np.frombuffer(straight[name], np.float32), atol=1e-2
            )


class Harder(Dataset[Any]):
    """Has samples that grow from epoch to epoch, of which some are evaluated."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        inputs = torch.randn(3, generator=torch.Generator().manual_seed(index)) * (1 + self.epoch)
        return inputs, inputs.sum(0, keepdim=True)


class Growing(Points):
    """Trains on a part of it, and evaluates the rest in between."""

    def __init__(self) -> None:
        self.whole = Harder()

    def train_dataset(self) -> Dataset[Any]:
        return Subset(self.whole, range(24))

    def eval_datasets(self) -> Any:
        return {"test": Subset(self.whole, range(24, 60))}


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 2), *slow((1, 2), (3, 0))])
def test_a_dataset_that_follows_the_epoch_is_the_same_on_any_number_of_processes(
    tmp_path, world_size, num_workers
):
    config = configure(Growing, num_lanes=4, steps=7)
    config = dataclasses.replace(config, evaluate=EvaluateConfig(every_steps=2))
    (expected,) = run_distributed(fit, 1, config, str(tmp_path / "alone"))
    config = dataclasses.replace(config, data=DataConfig(num_workers=num_workers))
    for found in run_distributed(fit, world_size, config, str(tmp_path / "found")):
        assert found == expected
