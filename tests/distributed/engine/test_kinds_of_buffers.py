"""Kinds of buffers that are easily pinned or lost: resized, integers of observers, not persistent."""

import dataclasses
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    QConfig,
    default_fused_per_channel_wt_fake_quant,
    disable_observer,
    prepare_qat,
)
from torch.utils.data import Dataset

from lanewise import Loss
from lanewise.config import EvaluateConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.engine.test_between_lanes import Points, fit, go_on
from tests.distributed.tasks import configure, state_bytes, train
from tests.slow import slow
from tests.unit.engine.own_loop.test_lanes import make_lanes

NUM_LANES = 4
WORLDS = pytest.mark.parametrize("world_size", [2, *slow(3)])


class Growing(nn.Module):
    """Resizes a buffer in place, to another size in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        number = len(self.seen)
        self.seen.resize_(number + 1)[number:] = inputs.mean()
        return self.layer(inputs)


class OfGrowing(Points):
    def build_model(self) -> nn.Module:
        return Growing()

    def eval_datasets(self) -> Any:
        return {"held_out": self.train_dataset()}


@WORLDS
def test_a_forward_may_resize_a_buffer_after_the_models_were_compared_and_the_best_one_was_written(
    world_size, tmp_path
):
    """Both looked at the bytes through numpy, which fixes the size of a tensor for ever."""
    config = configure(OfGrowing, num_lanes=NUM_LANES, steps=4)
    evaluate = EvaluateConfig(every_steps=1, best="held_out/loss")
    config = dataclasses.replace(config, evaluate=evaluate)
    alone = run_distributed(fit, 1, config, str(tmp_path / "alone"))[0]
    assert len(alone[0]["seen"]) == 4 * 5
    for result in run_distributed(fit, world_size, config, str(tmp_path / "several")):
        assert result == alone


class Quantised(Points):
    """Quantisation-aware training, with observers that may be calibrated beforehand and switched off."""

    def __init__(self, *, is_calibrated: bool) -> None:
        self.is_calibrated = is_calibrated

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        activation = FusedMovingAvgObsFakeQuantize.with_args(quant_min=0, quant_max=255)
        model.qconfig = QConfig(activation, default_fused_per_channel_wt_fake_quant)  # type: ignore[assignment]
        prepare_qat(model, inplace=True)
        if self.is_calibrated:
            model(self.train_dataset().tensors[0])  # type: ignore[attr-defined]
            model.apply(disable_observer)
        return model


def test_observers_are_calibrated_where_the_model_is_built_and_then_switched_off():
    """Each lane gave the integer zero_point another value, and no user can make it a float buffer."""
    config = configure(Quantised, num_lanes=NUM_LANES, steps=3, is_calibrated=True)
    alone = run_distributed(train, 1, config)[0]
    for result in run_distributed(train, 2, config):
        assert result == alone
    with pytest.raises(RuntimeError, match=r"zero_point differs between the lanes .*disable_observer"):
        run_distributed(train, 1, configure(Quantised, num_lanes=NUM_LANES, steps=3, is_calibrated=False))


class Balanced(nn.Module):
    """Adds a bias to its outputs that follows from counts in a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("counts", torch.zeros(1), persistent=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.counts += inputs.square().mean()
        return self.layer(inputs * self.table) + self.counts


class Balancing(Points):
    def build_model(self) -> nn.Module:
        return Balanced()


def test_counts_in_a_buffer_that_is_not_persistent_go_on(tmp_path):
    """They began at zero again, so the run ended with another model, and nobody said so."""
    config = configure(Balancing, num_lanes=NUM_LANES, steps=4)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, ema_decay=0.5))
    alone = run_distributed(go_on, 1, config, str(tmp_path / "alone"), 4)[0]
    run_distributed(go_on, 2, config, str(tmp_path / "stopped"), 2)
    for result in run_distributed(go_on, 1, config, str(tmp_path / "stopped"), 2):
        assert result == alone
    (part,) = (tmp_path / "stopped" / "step-000004").glob("part-*")
    with safe_open(part, framework="pt") as file:
        names = [name for name in file.keys() if "counts" in name or "table" in name]  # noqa: SIM118
    assert sorted(names) == ["lanewise_buffers/average/module.counts", "lanewise_buffers/model/counts"]
    assert list(alone[2]) == ["layer.weight", "layer.bias"]
    assert load_file(tmp_path / "stopped.safetensors").keys() == alone[2].keys()


class Counting(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([1.0, index / 32, 0.5])


def own_loop(world: World, folder: str, last_step: int) -> dict[str, bytes]:
    """Go on with a loop of one's own up to a step; return the model."""
    lanes = make_lanes(world)
    model = lanes.prepare(Balanced())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = lanes.checkpoints(folder, model=model, optimizer=optimizer)
    steps = lanes.steps(Counting(), first_step=checkpoints.step)
    for number, step in enumerate((step for _ in range(2) for step in steps), checkpoints.step):
        if number == last_step:
            break
        for batch in step:
            step.backward(model(batch).square().mean())
        optimizer.step()
    checkpoints.save(last_step)
    checkpoints.finish()
    return state_bytes(model)


def test_they_go_on_in_a_loop_of_ones_own(tmp_path):
    alone = run_distributed(own_loop, 1, str(tmp_path / "alone"), 4)[0]
    run_distributed(own_loop, 1, str(tmp_path / "stopped"), 2)
    assert run_distributed(own_loop, 2, str(tmp_path / "stopped"), 4) == [alone, alone]


class Overflowing(Points):
    """Its first step has a gradient that fp16 cannot hold, or no weight."""

    def __init__(self, cause: str) -> None:
        self.cause = cause

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        is_overflow = self.cause == "overflow"
        return Loss(outputs.float().sum() * (1e8 if is_overflow else 1), len(outputs) if is_overflow else 0)


def skip_by_trainer(world: World, cause: str) -> tuple[bool, int]:
    """Take a step that updates nothing; return whether the model is as before."""
    config = configure(Overflowing, num_lanes=NUM_LANES, steps=1, precision="fp16", cause=cause)
    engine = build_engine(config, world)
    before = state_bytes(engine.training.model)
    (report,) = engine.steps()
    return state_bytes(engine.training.model) == before, report.interval.skipped_steps


def skip_by_own_loop(world: World, cause: str) -> tuple[bool, int]:
    task = Overflowing(cause)
    lanes = make_lanes(world, precision="fp16", global_batch_size=NUM_LANES * 2)
    model = lanes.prepare(task.build_model())
    before = state_bytes(model)
    step = next(iter(lanes.steps(task.train_dataset())))
    for batch in step:
        with lanes.autocast():
            loss = task.loss(model(batch[0]), batch)
        step.backward(loss)
    assert all(one.grad is None for one in model.parameters())
    return state_bytes(model) == before, int(cause == "overflow")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loop", [skip_by_trainer, skip_by_own_loop])
@pytest.mark.parametrize("cause", ["overflow", "weight"])
def test_a_step_that_updates_nothing_leaves_the_buffers_as_they_were(cause, loop, world_size):
    """After an overflow the statistics of the step stayed, and after a weight of 0 they did not."""
    assert run_distributed(loop, world_size, cause) == [(True, int(cause == "overflow"))] * world_size
