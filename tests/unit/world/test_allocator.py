"""Freed memory stays with the process."""

import ctypes
import os
import resource

import pytest
import torch

from lanewise.testing import run_distributed
from lanewise.world.allocator import keep_freed_memory
from lanewise.world.world import World

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this libc is not glibc")


def count_faults(_world: World, keeps: bool, variable: str = "") -> int:
    """Count the page faults of ten tensors of 40 MiB, one after the other; the first ones don't count."""
    if variable:
        os.environ[variable] = "1"
    if keeps:
        keep_freed_memory()
    for number in range(12):
        if number == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_large_tensor_gets_the_memory_of_the_one_before():
    assert run_distributed(count_faults, 1, True)[0] < 100
    assert run_distributed(count_faults, 1, False)[0] > 1000


@pytest.mark.parametrize("variable", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_says_is_left_alone(variable):
    assert run_distributed(count_faults, 1, True, variable)[0] > 1000
