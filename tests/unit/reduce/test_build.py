"""What no reducer can train."""

import pytest
import torch
from torch import nn

from lanewise.config import DistributedConfig
from lanewise.errors import TaskError
from lanewise.reduce import build_reducer
from lanewise.world.world import LocalWorld


@pytest.mark.parametrize("devices", [1, 2])
def test_an_expanded_parameter_is_an_error_before_the_first_step(devices):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(2, 1).expand(2, 3))
    config = DistributedConfig(
        reducer="single" if devices == 1 else "data_parallel", devices=devices, device_type="cpu"
    )
    with pytest.raises(TaskError) as caught:
        build_reducer(model, 4, LocalWorld(torch.device("cpu")), config)
    assert "parameter scale is expanded: its shape is (2, 3), its strides are (1, 0)" in str(caught.value)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_frozen_parameter_may_be_expanded(devices):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(2, 1).expand(2, 3), requires_grad=False)
    config = DistributedConfig(
        reducer="single" if devices == 1 else "data_parallel", devices=devices, device_type="cpu"
    )
    build_reducer(model, 4, LocalWorld(torch.device("cpu")), config)
