"""The most that a model of accelerator computes by its data sheet, to compare what a run reaches with."""

from collections.abc import Mapping

_A100 = {"fp16": 312.0, "bf16": 312.0, "tf32": 156.0, "float32": 19.5}
_H100 = {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "float32": 66.9}
_V100 = {"fp16": 125.0, "float32": 15.7}

_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "Tesla T4": {"fp16": 65.0, "float32": 8.1},
    "Tesla V100-SXM2-16GB": _V100,
    "Tesla V100-SXM2-32GB": _V100,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 PCIe": {"fp16": 756.0, "bf16": 756.0, "tf32": 378.0, "float32": 51.0},
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H100,
}
"""By the name that torch gives a device, and the precision of a run: 10^12 operations per second on dense
matrices, from NVIDIA's data sheets of these models. A part of a device (MIG) has another name."""


def peak_flops_per_second(name: str, precision: str) -> float | None:
    """Return how many floating-point operations a device computes in a second at most; None: not known.

    Args:
        name: of the model, as `device_name` returns it.
        precision: of the run.
    """
    tflops = _TFLOPS.get(name, {}).get(precision)
    return None if tflops is None else tflops * 1e12
