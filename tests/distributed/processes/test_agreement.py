"""`exact` begins on equal machines only."""

import os
from typing import Any

import pytest
import torch

from lanewise.processes.world.agreement import require_equal_machines
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed


def compare(world: World, lacking: int | None) -> Any:
    """Compare the processes, one of which does without the instructions that its CPU has."""
    if world.rank == lacking:
        os.environ["ATEN_CPU_CAPABILITY"] = "default"  # torch reads it when it computes for the first time
    capability = torch.backends.cpu.get_cpu_capability()
    require_equal_machines(world)
    return capability


def test_processes_of_one_machine_agree():
    assert len(set(run_distributed(compare, 3, None, one_machine=False))) == 1


def test_a_process_without_the_instructions_of_the_others_is_named():
    if run_distributed(compare, 1, None) == ["DEFAULT"]:
        pytest.skip("torch has no code for particular CPUs here")
    expected = (
        r"got cpu_capability=DEFAULT of rank 2 on .*, and cpu_capability=\w+ of rank 0 on .*same kind of CPU"
    )
    with pytest.raises(RuntimeError, match=expected):
        run_distributed(compare, 3, 2, one_machine=False)
