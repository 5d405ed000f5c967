"""Compiled blocks: the same bytes under any reducer, on any number of processes, also if they run again."""

import warnings
from dataclasses import replace
from typing import Any

import pytest

from lanewise.config import ActivationCheckpointingConfig, CompileConfig, MemoryConfig, RunConfig
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.engine.test_activation_checkpointing import config_for
from tests.distributed.tasks import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMPILING_SECONDS = 500
"""Of the first that compiles: with no kernel in a cache, and other tests beside, 134 s were seen."""


def train_each(world: World, config: RunConfig, *is_checkpointed: bool) -> list[Any]:
    """Train with compiled layers, with checkpointing or without."""
    warnings.simplefilter("ignore")  # of inductor's own imports, in this process
    sections = [ActivationCheckpointingConfig() if one else None for one in is_checkpointed]
    return [
        train(
            world,
            replace(config, compile=CompileConfig(), memory=MemoryConfig(activation_checkpointing=section)),
        )
        for section in sections
    ]


@pytest.fixture(scope="module")
def alone() -> Any:
    config = config_for("single", 1)
    return run_distributed(train_each, 1, config, False, timeout_seconds=COMPILING_SECONDS)[0][0]


@pytest.mark.parametrize(
    ("reducer", "num_processes", "devices"),
    [("single", 1, 1), ("ddp", 2, 2), ("ddp", 3, 3), ("fsdp", 2, 2), ("balanced_data_parallel", 1, 2)],
)
def test_no_byte_depends_on_the_layout_or_on_what_runs_again(alone, reducer, num_processes, devices):
    results = run_distributed(train_each, num_processes, config_for(reducer, devices), False, True)
    assert results == [[alone] * 2] * num_processes


def eager_and_compiled(world: World, config: RunConfig) -> list[float]:
    warnings.simplefilter("ignore")
    return [train(world, replace(config, compile=one))[1][0] for one in (None, CompileConfig())]


def test_the_first_loss_is_that_of_eager_with_the_same_dropout():
    config = config_for("single", 1)
    ((eager, compiled),) = run_distributed(eager_and_compiled, 1, config, timeout_seconds=COMPILING_SECONDS)
    assert compiled == pytest.approx(eager, rel=1e-5)
