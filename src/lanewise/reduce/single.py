"""Sums the lanes' gradients in one process."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lanewise.lanes import LaneTurn
from lanewise.reduce.pending import PendingGradients
from lanewise.reduce.reducer import connect, divide_gradients


class SingleReducer:
    """One process carries all lanes: nothing travels.

    Args:
        parameters: all trainable parameters.
        num_lanes: lanes of the run.
        exact: add in the tree, at the price of ceil(log2(num_lanes)) further copies of the gradients.
        Otherwise
            autograd adds lane after lane.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_lanes: int, *, exact: bool) -> None:
        self._parameters = parameters
        self._pending = PendingGradients(parameters, num_lanes) if exact else None

    def forward(self, turn: LaneTurn, compute_loss: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        """See `Reducer`."""
        return connect(compute_loss(), self._parameters)

    def backward(self, turn: LaneTurn, loss_sum: torch.Tensor) -> None:
        """See `Reducer`."""
        loss_sum.backward()
        if self._pending is not None:
            self._pending.push(turn)

    def finish(self, weight: float) -> None:
        """See `Reducer`."""
        if self._pending is not None:
            self._pending.restore_root()
        divide_gradients(self._parameters, weight)

    def close(self) -> None:
        """See `Reducer`."""
