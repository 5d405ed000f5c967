"""BatchNorm over the lanes that processes run at once.

torch's SyncBatchNorm computes on accelerators only. Here a stand-in takes the place of its kernels;
tests/gpu/test_sync_batch_norm.py runs the same with torch's own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import batchnorm
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task
from lanewise.config import DataConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.engine.transforms import synchronise_batch_norm
from lanewise.errors import ConfigError
from lanewise.processes.device.determinism import set_determinism
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure

# Adam would make steps of the rounding in the gradient of a bias before BatchNorm, which is zero.
OPTIMIZER = {"optimizer": "torch.optim.SGD", "lr": 0.02}


class Normed(Task):
    """Two kinds of BatchNorm, of which one is trained; `ignored` samples have weight 0."""

    def __init__(self, ignored: tuple[int, ...] = ()) -> None:
        self.ignored = ignored

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Unflatten(1, (3, 2, 1)),
            nn.ModuleDict({"inner": nn.BatchNorm2d(3, affine=False)})["inner"],
            nn.Flatten(),
            nn.Linear(6, 1),
        )

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2, torch.arange(48))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        weights = ~torch.isin(batch[2], torch.tensor(self.ignored, device=batch[2].device))
        losses = nn.functional.mse_loss(outputs, batch[1], reduction="none").squeeze(1)
        total = (losses * weights).sum()
        return Loss(total if weights.any() else total.detach(), weights.sum())


def configured(
    num_lanes: int, micro_batch_size: int, *, is_synchronised: bool = True, **task: Any
) -> RunConfig:
    config = configure(
        Normed,
        num_lanes=num_lanes,
        micro_batch_size=micro_batch_size,
        steps=4,
        equality="close",
        **OPTIMIZER,
        **task,
    )
    distributed = dataclasses.replace(config.distributed, sync_batch_norm=is_synchronised)
    return dataclasses.replace(config, distributed=distributed, data=DataConfig(drop_last=True))


class SumOfAll(torch.autograd.Function):
    """The sum over processes, and of its gradients."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return SumOfAll.forward(None, gradient)


class StandIn:
    """Computes what torch's function of SyncBatchNorm computes, on any device."""

    @staticmethod
    def apply(inputs, weight, bias, running_mean, running_var, eps, momentum, _group, world_size):
        def per_channel(values: torch.Tensor) -> torch.Tensor:
            return values.view(-1, *[1] * (inputs.dim() - 2))

        dims = [0, *range(2, inputs.dim())]
        count = world_size * inputs.numel() / inputs.shape[1]
        mean = SumOfAll.apply(inputs.sum(dims)) / count
        centered = inputs - per_channel(mean)
        variance = SumOfAll.apply(centered.square().sum(dims)) / count
        with torch.no_grad():
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(variance * count / (count - 1), momentum)
        normed = centered / per_channel((variance + eps).sqrt())
        return normed if weight is None else normed * per_channel(weight) + per_channel(bias)


def train(world, config: RunConfig) -> Any:
    """Return losses, weights and buffers."""
    if world.device.type == "cpu":
        batchnorm.sync_batch_norm = StandIn  # type: ignore[assignment]
        torch._C._get_privateuse1_backend_name = lambda: "cpu"
        nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # type: ignore[assignment]
    set_determinism("close", threads=1)
    engine = build_engine(config, world)
    losses = [report.totals.loss for report in engine.steps()]
    return losses, {name: value.cpu() for name, value in engine.training.model.state_dict().items()}


def near(found: Any, other: Any) -> bool:
    (losses, state), (expected, expected_state) = found, other
    assert state.keys() == expected_state.keys()
    return losses == pytest.approx(expected, rel=1e-4) and all(
        torch.allclose(state[name], value, rtol=1e-4, atol=1e-5) for name, value in expected_state.items()
    )


def check_lanes_that_are_normalised_together(run: Callable[..., Any]) -> None:
    """Two lanes of 8 samples that run at once give what one lane of 16 gives, which two alone do not.

    Args:
        run: `run_distributed`, or another function that gets as much.
    """
    (together,) = run(train, 1, configured(1, 16, is_synchronised=False))
    assert all(near(result, together) for result in run(train, 2, configured(2, 8)))
    for apart in run(train, 2, configured(2, 8, is_synchronised=False)):
        assert not near(apart, together)


def check_lanes_in_turn(run: Callable[..., Any]) -> None:
    """Each process runs three lanes, one after the other; all end with the same model."""
    first, second = run(train, 2, configured(6, 4))
    assert first[0] == second[0]
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())


def test_lanes_that_run_at_once_are_normalised_together():
    check_lanes_that_are_normalised_together(run_distributed)


def test_lanes_in_turn_end_with_one_model():
    check_lanes_in_turn(run_distributed)


def test_an_unequal_number_of_lanes_is_an_error_before_the_first_forward():
    with pytest.raises(RuntimeError, match="in step 1 these have 2 and 1 lanes"):
        run_distributed(train, 3, configured(4, 4))


def test_a_lane_that_contributes_nothing_is_an_error_and_no_hang():
    with pytest.raises(RuntimeError, match="or a loss of weight 0 without a gradient, and so no backward"):
        run_distributed(train, 2, configured(2, 8, ignored=tuple(range(48))))


def test_names_and_values_stay_and_every_batch_norm_is_converted():
    model = Normed().build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = synchronise_batch_norm(model)
    assert converted.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())
    assert [type(module) for module in converted if module.state_dict()][1:3] == [nn.SyncBatchNorm] * 2


def test_a_model_without_batch_norm_has_nothing_to_synchronise():
    with pytest.raises(ConfigError, match=r"the model has no BatchNorm\. Leave it out"):
        synchronise_batch_norm(nn.Linear(2, 1))
