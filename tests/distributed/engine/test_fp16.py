"""Training in fp16: the same bytes on any number of processes, in range from the first step, and overflow."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lanewise import Callback, Loss, Task
from lanewise.engine.engine import build_engine
from lanewise.engine.precision import LossScale
from lanewise.lanes import FeistelShuffle
from lanewise.processes.device.determinism import set_determinism
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, configure, train
from tests.slow import slow


@pytest.fixture(scope="module")
def alone():
    return run_distributed(train, 1, configure(Language, precision="fp16"))[0]


def test_it_trains_and_differs_from_float32(alone):
    assert alone[1][-1] < alone[1][0]
    assert alone[0] != run_distributed(train, 1, configure(Language))[0][0]


@pytest.mark.parametrize("world_size", [*slow(2), 3])
def test_a_transformer_ends_with_the_same_bytes_and_losses(alone, world_size):
    for result in run_distributed(train, world_size, configure(Language, precision="fp16")):
        assert result == alone


class Line(Task):
    """A linear model, with a factor for each sample that its loss is multiplied by."""

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.ones(16, 4), torch.ones(16))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).squeeze(-1)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss((outputs * batch[1]).sum(), outputs.numel())


NUM_TOKENS = 4096


class Tokens(Line):
    """Each sample has so many tokens that the scaled sum of their gradients is far beyond fp16."""

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.ones(2, NUM_TOKENS, 4), torch.ones(2, 1))


def set_no_unit(scale: LossScale, num_units: float) -> None:
    scale._unit = 1.0


def take_first_step(world, has_unit) -> tuple[int, float, bool]:
    if not has_unit:  # this process is the test's own
        LossScale.set_unit = set_no_unit
    config = configure(Tokens, num_lanes=2, micro_batch_size=1, steps=1, precision="fp16")
    engine = build_engine(config, world)
    before = copy.deepcopy(engine.training.model.state_dict())
    (report,) = engine.steps()
    after = engine.training.model.state_dict()
    is_untouched = all(torch.equal(before[name], after[name]) for name in after)
    return report.interval.skipped_steps, report.interval.grad_norm().item(), is_untouched


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sum_over_thousands_of_tokens_is_in_range_at_the_first_step(world_size):
    for num_skipped, grad_norm, is_untouched in run_distributed(take_first_step, world_size, True):
        assert (num_skipped, is_untouched) == (0, False)
        assert grad_norm == pytest.approx(math.sqrt(5))  # 1 for each of four weights and a bias


def test_without_the_unit_it_would_not_be():
    ((num_skipped, grad_norm, is_untouched),) = run_distributed(take_first_step, 1, False)
    assert (num_skipped, is_untouched) == (1, True)
    assert not math.isfinite(grad_norm)


NUM_STEPS, PLANTED_STEP = 4, 2
PLANTED_SAMPLE = int(FeistelShuffle(16, seed=0).indices(0, 10, 11)[0])  # of steps of four, lane 1 of step 2


class Overflowing(Line):
    """One sample's loss has a gradient that fp16 cannot hold; the loss itself is float32, and finite."""

    def train_dataset(self) -> Dataset[Any]:
        factors = torch.ones(16)
        factors[PLANTED_SAMPLE] = 1e4
        return TensorDataset(torch.ones(16, 4) / 8, factors)


class Remember(Callback):
    """Notes what it is told, and where the training is by then."""

    def __init__(self, run) -> None:
        self.run, self.training = run, run.training
        self.skipped_steps: list[float] = []
        self.losses: list[float] = []
        self.factors: list[float] = []
        self.states: list[dict[str, torch.Tensor]] = [self.state()]

    def state(self) -> dict[str, torch.Tensor]:
        models = {"model": self.training.model, "average": self.training.average.module}
        return {
            f"{key}.{name}": value.clone()
            for key, model in models.items()
            for name, value in model.state_dict().items()
        }

    def on_step(self, epoch, step, metrics):
        self.skipped_steps.append(metrics["train/skipped_steps"])
        self.losses.append(metrics["train/loss"])
        self.factors.append(self.run.runner.precision.loss_scale.factor)
        self.states.append(self.state())


def overflow(world, folder) -> tuple[list[float], list[float], list[float], list[bool], list[int]]:
    set_determinism("exact", 1)
    config = configure(Overflowing, num_lanes=2, steps=NUM_STEPS, precision="fp16")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, ema_decay=0.5))
    engine = build_engine(config, world)
    seen = Remember(engine.run)
    engine.fit(RunDir(Path(folder)), [seen])
    have_changed = [
        not all(torch.equal(before[name], after[name]) for name in after)
        for before, after in zip(seen.states, seen.states[1:], strict=False)
    ]
    updates = [int(state["step"]) for state in engine.training.optimizer.state.values()]
    return seen.skipped_steps, seen.losses, seen.factors, have_changed, updates


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_skips_its_step_and_halves_the_scale(tmp_path, world_size):
    ranks = run_distributed(overflow, world_size, str(tmp_path))
    skipped_steps, losses, factors, have_changed, _ = ranks[0]
    assert skipped_steps == [0, 0, 1, 1]
    assert all(map(math.isfinite, losses))
    assert factors == [2.0**14, 2.0**14, 2.0**13, 2.0**13]  # four samples, so the unit is 1/4
    assert have_changed == [step != PLANTED_STEP for step in range(NUM_STEPS)]
    assert [updates for *_, updates in ranks] == [[NUM_STEPS - 1] * 2] * world_size
