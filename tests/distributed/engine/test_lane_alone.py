"""A lane that is run again by itself gives the bytes that it gave in its step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lanewise import Task
from lanewise.config import PrecisionName, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld, World
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure

NUM_LANES = 6
STEP = 3  # with 34 samples in steps of 12 the first one of the second epoch
LANE = 2  # of three processes the second carries it and lane 3, in whose backward alone DDP takes part


class Statistics(Task):
    """BatchNorm, whose statistics the steps before have changed, and dropout."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Dropout(0.3), nn.Linear(8, 3)
        )

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.randn(34, 5, generator=torch.Generator().manual_seed(4)))

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        noise = torch.rand(outputs.shape[1])  # goes on with the random numbers of the forward
        return (outputs.float() - noise).square().mean()


def watch(world: World, config: RunConfig) -> tuple[dict[str, Any], bytes, dict[str, bytes]] | None:
    """Run to the end; return the state at the start of STEP, and what the step made of LANE, where it ran."""
    set_determinism("exact", 1)
    engine = build_engine(config, world)
    engine.step.pass_.looks.clear()  # which run a lane again
    model, task = engine.training.model, engine.run.runner.task
    losses: list[torch.Tensor] = []
    gradients: dict[str, bytes] = {}
    turns = [(one.turn.step, one.turn.lane) for one in engine.run.loader.batches(0, engine.run.last_step)]
    num_losses = 0
    compute = task.loss

    def is_it() -> bool:
        return turns[num_losses - 1] == (STEP, LANE)

    def loss(outputs: Any, batch: Any) -> Any:
        nonlocal num_losses
        num_losses += 1
        returned = compute(outputs, batch)
        if is_it():
            losses.append(returned)
        return returned

    def keep(parameter: torch.Tensor, name: str) -> None:
        if is_it():
            gradients[name] = parameter.grad.numpy().tobytes()

    task.loss = loss
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: keep(one, name))
    start: dict[str, Any] = {}
    for report in engine.steps():
        if report.step == STEP - 1:
            start = {name: value.clone() for name, value in model.state_dict().items()}
    return (start, losses[0].detach().numpy().tobytes(), gradients) if losses else None


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_lane_depends_on_its_step_s_start_and_its_batch_alone(world_size: int, precision: PrecisionName):
    config = configure(Statistics, num_lanes=NUM_LANES, micro_batch_size=2, steps=5, precision=precision)
    ((start, loss_bytes, gradients),) = filter(None, run_distributed(watch, world_size, config))

    set_determinism("exact", 1)
    engine = build_engine(config, LocalWorld(torch.device("cpu")))
    model = engine.training.model
    (batch,) = [one for one in engine.run.loader.batches(STEP, STEP + 1) if one.turn.lane == LANE]
    for _ in range(2):
        model.load_state_dict(start)
        model.zero_grad()
        loss = engine.run.runner.lane(batch).run(model)
        root, factor = loss.root(batch.turn, 1.0)
        root.backward(factor)
        assert loss.value.detach().numpy().tobytes() == loss_bytes
        again = {name: one.grad.numpy().tobytes() for name, one in model.named_parameters()}
        assert again == gradients
