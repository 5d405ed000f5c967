"""A digest is the same on an accelerator, where the pieces are larger."""

from itertools import product

import torch

from lanewise.processes.device.tensor_bytes import placed_checksum

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool)
SIZES = (0, 1, 2**15 + 1, 2**22 + 3)


def compare(world):
    generator = torch.Generator().manual_seed(0)
    wrong = []
    for dtype, size in product(DTYPES, SIZES):
        tensor = torch.randn(size, generator=generator).mul(50).to(dtype)
        if int(placed_checksum(tensor.to(world.device))) != int(placed_checksum(tensor)):
            wrong.append((dtype, size))
    return wrong


def test_a_tensor_has_the_checksum_that_it_has_on_the_cpu(device):
    assert device.run(compare, 1) == [[]]
