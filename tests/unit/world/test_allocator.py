"""Large tensors are where malloc keeps what is freed."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from lanewise.testing import run_distributed
from lanewise.world.allocator import keep_freed_memory
from lanewise.world.world import World

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this libc is not glibc")


def is_on_heap(_world: World, keeps: bool, variable: str = "") -> bool:
    """Tell whether a tensor of 40 MiB is on the heap, which keeps it, or mapped by itself."""
    if variable:
        os.environ[variable] = "1"
    if keeps:
        keep_freed_memory()
    tensor = torch.ones(10 * 2**20)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    ends = [int(address, 16) for line in maps for address in line.split()[0].split("-")]
    return min(ends) <= tensor.data_ptr() < max(ends)


def test_a_large_tensor_is_on_the_heap():
    assert run_distributed(is_on_heap, 1, True) == [True]
    assert run_distributed(is_on_heap, 1, False) == [False]


@pytest.mark.parametrize("variable", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_says_is_left_alone(variable):
    assert run_distributed(is_on_heap, 1, True, variable) == [False]
