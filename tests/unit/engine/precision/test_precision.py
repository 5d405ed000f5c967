"""The number format in which forward computes."""

import pytest
import torch

from lanewise.engine.precision import LossScale, Precision


@pytest.fixture(autouse=True)
def restore():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("tf32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_products_are_computed_in_the_format(name, dtype):
    with Precision(name, "cpu").forward():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "matmul"), [("float32", "highest"), ("tf32", "high"), ("bf16", "highest"), ("fp16", "highest")]
)
def test_tf32_is_on_only_where_it_was_asked_for(name, matmul):
    Precision(name, "cuda")
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cudnn.allow_tf32 is (name == "tf32")


@pytest.mark.parametrize("name", ["float32", "tf32", "bf16", "fp16"])
def test_only_fp16_needs_a_loss_scale(name):
    loss_scale = Precision(name, "cpu").loss_scale
    assert isinstance(loss_scale, LossScale) if name == "fp16" else loss_scale is None


@pytest.mark.parametrize(("name", "device_type"), [("fp16", "cpu"), ("bf16", "cpu"), ("fp16", "cuda")])
def test_fp16_on_a_cpu_is_said_to_be_slow(name, device_type, caplog):
    Precision(name, device_type)
    assert ("fp16 is slow on a CPU" in caplog.text) == ((name, device_type) == ("fp16", "cpu"))
