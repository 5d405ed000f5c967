"""The peaks of well-known accelerators, and nothing made up about others."""

import pytest

from lanewise.processes.device.peak import _TFLOPS, peak_flops_per_second


def test_a_known_device_has_the_peak_of_its_data_sheet():
    assert peak_flops_per_second("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops_per_second("NVIDIA H100 80GB HBM3", "float32") == pytest.approx(66.9e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cpu", "float32"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16"),
        ("Tesla T4", "bf16"),
        ("Tesla V100-SXM2-16GB", "tf32"),
    ],
)
def test_what_is_not_known_has_none(name, precision):
    assert peak_flops_per_second(name, precision) is None


@pytest.mark.parametrize("name", _TFLOPS)
def test_fewer_bits_are_never_slower(name):
    peaks = _TFLOPS[name]
    order = [peaks[precision] for precision in ("float32", "tf32", "bf16", "fp16") if precision in peaks]
    assert order == sorted(order)
    assert 5 < order[0] < order[-1] < 5000
