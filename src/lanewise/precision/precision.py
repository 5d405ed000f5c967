"""The number format of forward and loss; weights, gradients and their sums stay in float32."""

from contextlib import AbstractContextManager, nullcontext

import torch


class Precision:
    """Runs forward and loss in a number format.

    Args:
        name: `float32`; `tf32`, in which GPUs round the inputs of matrix products to 10 bits of mantissa; or
            `bf16`, torch's autocast to bfloat16.
        device_type: `cpu` or `cuda`.
    """

    def __init__(self, name: str, device_type: str) -> None:
        self._name = name
        self._device_type = device_type
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"

    def forward(self) -> AbstractContextManager[object]:
        """Enter the format, for one lane's forward and loss: weights are cast once in it."""
        if self._name == "bf16":
            return torch.autocast(self._device_type, torch.bfloat16)
        return nullcontext()
