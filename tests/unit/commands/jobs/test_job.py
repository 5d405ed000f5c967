"""What is checked before any process starts."""

import dataclasses

import pytest

from lanewise.commands.jobs.train import TrainJob
from lanewise.config import DataConfig, DistributedConfig, OptimizerConfig
from lanewise.errors import ConfigError
from lanewise.processes.world.environment import Environment
from tests.distributed.tasks import Smooth, configure


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("capturable", "optimizer.init_args.capturable needs a GPU: got the device cpu"),
        ("differentiable", "optimizer.init_args.differentiable cannot be used"),
    ],
)
def test_an_option_that_the_first_update_would_fail_with_is_refused(option, said):
    optimizer = OptimizerConfig(class_path="torch.optim.Adam", init_args={option: True})
    distributed = DistributedConfig(device_type="cpu", devices=2)
    config = dataclasses.replace(configure(Smooth), optimizer=optimizer, distributed=distributed)
    with pytest.raises(ConfigError, match=said):
        TrainJob(config).check_devices(Environment(world_size=2, local_world_size=2))


def test_batch_norm_is_synchronised_on_accelerators_only():
    distributed = DistributedConfig(device_type="cpu", devices=2, sync_batch_norm=True)
    data = DataConfig(drop_last=True)
    config = dataclasses.replace(configure(Smooth), distributed=distributed, data=data)
    with pytest.raises(
        ConfigError, match=r"sync_batch_norm needs accelerators.*: got the CPU\. Leave it out"
    ):
        TrainJob(config).check_devices(Environment(world_size=2, local_world_size=2))
