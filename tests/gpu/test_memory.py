"""What is traded for memory on an accelerator: blocks that run again, inputs on the host, compiled blocks."""

import warnings
from dataclasses import replace

import pytest

from lanewise.commands.plan.micro_batch import MemoryJob, largest_that_fits
from lanewise.config import ActivationCheckpointingConfig, BatchConfig, CompileConfig, MemoryConfig
from tests.distributed.engine.test_activation_checkpointing import Checkpointed, config_for
from tests.distributed.tasks import train


def checkpointed(section=None):
    config = config_for("ddp", 1)
    distributed = replace(config.distributed, device_type="auto", devices=None)
    return replace(config, memory=MemoryConfig(activation_checkpointing=section), distributed=distributed)


@pytest.mark.parametrize("options", [{}, {"offload": True}])
@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_that_run_again_change_no_byte(device, options, world_size):
    (plain,) = device.run(train, 1, checkpointed())
    results = device.run(train, world_size, checkpointed(ActivationCheckpointingConfig(**options)))
    assert results == [plain] * world_size


def train_compiled(world, config):
    warnings.simplefilter("ignore")  # torch's compiler warns of what it does itself
    return train(world, config)


def test_compiled_blocks_leave_the_same_bytes_in_two_processes(device):
    if device.type != "cuda":
        pytest.skip("inductor knows no such device")
    config = replace(checkpointed(ActivationCheckpointingConfig()), compile=CompileConfig())
    (alone,) = device.run(train_compiled, 1, config)
    assert device.run(train_compiled, 2, config) == [alone] * 2


def test_the_largest_micro_batch_is_found(device):
    config = replace(checkpointed(), batch=BatchConfig(global_batch_size=24, micro_batch_size=1))
    (memory,) = device.run(MemoryJob(config, Checkpointed(num_samples=43)).run, 1)
    assert memory.device_type == device.type
    assert largest_that_fits(config, memory, has_room=None) == 24  # that is of a CPU
