"""What is checked before any process starts."""

import dataclasses

import pytest

from lanewise.config import ClassConfig, DistributedConfig
from lanewise.errors import ConfigError
from lanewise.jobs.train import TrainJob
from lanewise.world.environment import Environment
from tests.distributed.tasks import Smooth, configure


def test_an_optimizer_that_needs_a_gpu_is_refused_on_a_cpu():
    optimizer = ClassConfig(class_path="torch.optim.Adam", init_args={"capturable": True})
    distributed = DistributedConfig(device_type="cpu", devices=2)
    config = dataclasses.replace(configure(Smooth), optimizer=optimizer, distributed=distributed)
    with pytest.raises(ConfigError, match=r"optimizer.init_args.capturable needs a GPU: got the device cpu"):
        TrainJob(config).check(Environment(world_size=2, local_world_size=2))
