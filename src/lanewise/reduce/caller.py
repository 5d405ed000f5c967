"""The module that torch's DDP and FSDP wrap in place of the user's own, so that the task sees no wrapper."""

from collections.abc import Callable
from typing import final

import torch
from torch import nn


@final
class Caller(nn.Module):
    """Holds the user's module, so that a wrapper finds its parameters; its forward calls a given function.

    This function may call any method of the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call a function that runs the user's module."""
        return function()
