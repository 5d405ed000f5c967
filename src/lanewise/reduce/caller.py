"""What torch's wrappers wrap in place of the user's module, so that the task never meets a wrapper."""

from collections.abc import Callable

import torch
from torch import nn


class Caller(nn.Module):
    """Holds the user's module, for a wrapper to find its parameters; calling it calls the given function.

    So any method of the user's module may be called in a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call a function that runs the user's module."""
        return function()
