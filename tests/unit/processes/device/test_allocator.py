"""Large tensors are where malloc keeps what is freed, or where it gives that back."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from lanewise.processes.device.allocator import set_malloc
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this libc is not glibc")


NUM_BYTES = 2**25 + 1
"""More than glibc keeps unless told to, and more than the heap of a test's process has free already."""


def is_on_heap(_world: World, keeps_freed: list[bool], variable: str = "") -> bool:
    """Tell whether a tensor is on the heap, which keeps it, or mapped by itself."""
    if variable:
        os.environ[variable] = "1"
    for keeps in keeps_freed:
        set_malloc(keeps_freed=keeps)
    tensor = torch.ones(NUM_BYTES, dtype=torch.uint8)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    ends = [int(address, 16) for line in maps for address in line.split()[0].split("-")]
    return min(ends) <= tensor.data_ptr() < max(ends)


@pytest.mark.parametrize(("keeps_freed", "expected"), [([], False), ([True], True), ([True, False], False)])
def test_where_a_tensor_is(keeps_freed, expected):
    assert run_distributed(is_on_heap, 1, keeps_freed) == [expected]


@pytest.mark.parametrize("variable", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_says_is_left_alone(variable):
    assert run_distributed(is_on_heap, 1, [True], variable) == [False]
