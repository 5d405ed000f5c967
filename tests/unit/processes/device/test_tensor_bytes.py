"""The bytes of tensors, which stay tensors that can be resized."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lanewise.processes.device.tensor_bytes import tensor_bytes


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
