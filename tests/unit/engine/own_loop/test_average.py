"""The average of the weights in an own loop, a start from other weights, and what lanes were given."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lanewise.commands.verify.audit import Audit
from lanewise.config import InitFromConfig
from lanewise.errors import CheckpointError, TaskError
from lanewise.testing import run_distributed
from tests.unit.engine.own_loop.test_lanes import make_lanes, state_of


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def samples() -> TensorDataset:
    inputs = torch.arange(36.0).reshape(12, 3) / 36
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(world: Any, folder: Path, last_step: int) -> list[Any]:
    """Train with an average up to a step, from the checkpoint before it if there is one, and save."""
    lanes = make_lanes(world, global_batch_size=4, micro_batch_size=2)
    model = lanes.prepare(build(), ema_decay=0.5)
    average = lanes.average(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = lanes.checkpoints(folder / "run", model=model, optimizer=optimizer, average=average)
    steps = lanes.steps(samples(), first_step=checkpoints.step, audit=folder)
    expected = [weight.detach().clone() for weight in average.module.parameters()]
    for step in itertools.chain(steps, steps):
        if step.number == last_step:
            break
        for inputs, targets in step:
            weight = 0 if step.number == 1 else 1  # the second step updates nothing
            step.backward(lanewise_loss(model(inputs), targets, weight))
        optimizer.step()
        average.update(step)
        if step.number != 1:
            for mean, parameter in zip(expected, model.parameters(), strict=True):
                if step.number == 0:  # the average begins with the first update
                    mean.copy_(parameter.detach())
                else:
                    mean.lerp_(parameter.detach(), 0.5)
        checkpoints.save(step.number + 1)
    checkpoints.finish()
    for mean, parameter in zip(expected, average.module.parameters(), strict=True):
        assert torch.allclose(mean, parameter)
    lanes.save_model(average.module, folder / "averaged.safetensors")
    return state_of(model, average.module)


def lanewise_loss(outputs: torch.Tensor, targets: torch.Tensor, weight: int) -> Any:
    from lanewise import Loss

    return Loss(((outputs - targets) ** 2).sum() * weight, weight=weight * len(targets))


def test_the_average_is_the_same_on_any_number_of_processes_and_after_a_resume(tmp_path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    (whole,) = run_distributed(train, 1, tmp_path / "whole", 5)
    assert whole[0] != whole[1]
    run_distributed(train, 2, tmp_path / "parts", 2)
    assert run_distributed(train, 1, tmp_path / "parts", 5) == [whole]
    report = Audit(tmp_path / "parts" / "audit").check()
    assert (report.problems, report.num_steps) == ([], 5)
    assert list(Audit(tmp_path / "whole" / "audit").compare(Audit(tmp_path / "parts" / "audit"))) == []


def begin(world: Any, init_from: str | InitFromConfig) -> list[Any]:
    lanes = make_lanes(world)
    model = lanes.prepare(build(), init_from=init_from)
    with pytest.raises(TaskError, match=r"lanes\.prepare\(model, ema_decay=0\.999\)"):
        lanes.average(model)
    return state_of(model)


def test_a_loop_begins_with_the_weights_of_a_file(tmp_path):
    (found,) = run_distributed(train, 1, tmp_path, 3)
    file = str(tmp_path / "averaged.safetensors")
    assert run_distributed(begin, 2, file) == [found[1:]] * 2
    (partly,) = run_distributed(begin, 1, InitFromConfig(path=file, leave_out=("2.*",)))
    assert [name for name, value in partly[0].items() if value != found[1][name]] == ["2.weight", "2.bias"]
    with pytest.raises(RuntimeError, match=CheckpointError.__name__):
        run_distributed(begin, 1, str(tmp_path / "nothing.safetensors"))
