"""What no reducer can train."""

import pytest
import torch
from torch import nn

from lanewise.config import DistributedConfig
from lanewise.errors import TaskError
from lanewise.lanes import Placement
from lanewise.processes.world.world import LocalWorld
from lanewise.reduce import build_reducer

ALONE = LocalWorld(torch.device("cpu"))


@pytest.mark.parametrize("devices", [1, 2])
def test_an_expanded_parameter_is_an_error_before_the_first_step(devices):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(2, 1).expand(2, 3))
    config = DistributedConfig(
        reducer="single" if devices == 1 else "data_parallel", devices=devices, device_type="cpu"
    )
    with pytest.raises(TaskError) as caught:
        build_reducer(model, Placement.of(4, ALONE), ALONE, config)
    assert "parameter scale is expanded: its shape is (2, 3), its strides are (1, 0)" in str(caught.value)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_frozen_parameter_may_be_expanded(devices):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(2, 1).expand(2, 3), requires_grad=False)
    config = DistributedConfig(
        reducer="single" if devices == 1 else "data_parallel", devices=devices, device_type="cpu"
    )
    build_reducer(model, Placement.of(4, ALONE), ALONE, config)


def test_a_model_that_is_distributed_already_is_an_error():
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(TaskError, match=r"module 0 of the model .* DataParallel.* plain module"):
        build_reducer(model, Placement.of(4, ALONE), ALONE, DistributedConfig())


def test_a_lazy_module_without_a_shape_is_an_error_before_the_first_step():
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(TaskError, match=r"0\.weight, .*1\.running_mean.*: run the model once on a small one"):
        build_reducer(
            model,
            Placement.of(4, ALONE),
            ALONE,
            DistributedConfig(),
        )
    model(torch.zeros(2, 3))
    build_reducer(
        model,
        Placement.of(4, ALONE),
        ALONE,
        DistributedConfig(),
    )
