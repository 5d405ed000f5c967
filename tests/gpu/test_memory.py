"""What is traded for memory on a GPU: blocks that run again, inputs in host memory, compiled blocks."""

from dataclasses import replace

import pytest

from lanewise.commands.plan.micro_batch import MemoryJob, largest_that_fits
from lanewise.config import ActivationCheckpointingConfig, BatchConfig, CompileConfig, MemoryConfig
from lanewise.testing import run_distributed
from tests.distributed.tasks import train
from tests.distributed.test_activation_checkpointing import Checkpointed, config_for

pytestmark = pytest.mark.gpu


def checkpointed(section=None):
    config = config_for("ddp", 1)
    distributed = replace(config.distributed, device_type="auto", devices=None)
    return replace(config, memory=MemoryConfig(activation_checkpointing=section), distributed=distributed)


@pytest.mark.parametrize("options", [{}, {"offload": True}])
@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_that_run_again_change_no_byte(options, world_size):
    (plain,) = run_distributed(train, 1, checkpointed(), device="cuda:0")
    results = run_distributed(
        train, world_size, checkpointed(ActivationCheckpointingConfig(**options)), device="cuda:0"
    )
    assert results == [plain] * world_size


def test_compiled_blocks_leave_the_same_bytes_in_two_processes():
    config = replace(checkpointed(ActivationCheckpointingConfig()), compile=CompileConfig())
    (alone,) = run_distributed(train, 1, config, device="cuda:0")
    assert run_distributed(train, 2, config, device="cuda:0") == [alone] * 2


def test_the_largest_micro_batch_is_found():
    config = replace(checkpointed(), batch=BatchConfig(global_batch_size=24, micro_batch_size=1))
    (memory,) = run_distributed(MemoryJob(config, Checkpointed(num_samples=43)).run, 1, device="cuda:0")
    assert memory.device_type == "cuda"
    assert largest_that_fits(config, memory, has_room=None) == 24  # that is of a CPU
