"""The bytes of tensors, which stay tensors that can be resized, and their checksums by place."""

from functools import reduce
from operator import xor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lanewise.processes.device.tensor_bytes import placed_checksum, tensor_bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int16).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.nn.Parameter(torch.ones(3)),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16).expand(2, 2),
        torch.tensor(True),
        torch.zeros(0, 3),
    ],
)
def test_bytes_are_those_of_the_elements_in_order(tensor):
    copied = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert tensor_bytes(tensor).tobytes() == bytes(copied.reshape(-1).view(torch.uint8).tolist())


def test_a_tensor_whose_bytes_were_read_can_be_resized():
    buffer = torch.arange(3.0)
    assert len(tensor_bytes(buffer)) == 12
    assert buffer.resize_(5000).shape == (5000,)
    buffer.untyped_storage().resize_(0)  # as fsdp does


def test_a_tensor_without_memory_is_refused():
    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(TypeError, match="a FakeTensor has no memory"):
        tensor_bytes(fake)
    with pytest.raises(RuntimeError):
        tensor_bytes(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0, 1, 5, 2**15, 2**15 + 1, 2**16 + 3])
def test_a_placed_checksum_is_the_xor_of_products(dtype, size):
    """The rule in Python's integers, of one piece and of several."""
    tensor = torch.randint(-100, 100, (size,)).to(dtype)
    width = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    products = [
        element * (2 * place + 1) * 0x9E3779B97F4A7C15
        for place, element in enumerate(tensor.view(width).tolist())
    ]
    assert int(placed_checksum(tensor)) % 2**64 == reduce(xor, products, 0) % 2**64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64, torch.complex128], ids=str)
def test_placed_checksums_of_parts_join_by_xor(dtype):
    tensor = torch.randn(11, 3).to(dtype)
    first, second = tensor.split([4, 7])
    joined = placed_checksum(first) ^ placed_checksum(second, first.numel())
    assert joined == placed_checksum(tensor)
    assert joined != placed_checksum(first) ^ placed_checksum(second)
