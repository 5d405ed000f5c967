"""The number format of forward and loss; weights, gradients and their sums stay in float32."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import final

import torch

from lanewise.engine.precision.loss_scale import LossScale

logger = logging.getLogger(__name__)

_AUTOCAST = {"float32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
class Precision:
    """Runs forward and loss in a number format.

    Args:
        name: `float32`; `tf32`, in which GPUs round the inputs of matrix products to 10 bits of mantissa; or
            `bf16` and `fp16`, torch's autocast to 16 bits.
        device_type: the type of the device that computes.
    """

    def __init__(self, name: str, device_type: str) -> None:
        dtype = _AUTOCAST[name]
        if (name, device_type) == ("fp16", "cpu"):
            logger.warning("fp16 is slow on a CPU: a convolution takes ten times as long. Use bf16 there.")
        self.forward: Callable[[], AbstractContextManager[object]] = (
            nullcontext if dtype is None else partial(torch.autocast, device_type, dtype)
        )
        """Returns the context of a forward, a loss, or both; weights are cast once in it."""
        self.loss_scale = LossScale() if name == "fp16" else None
        """The scale of losses; None where the format has the range of float32."""
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"
