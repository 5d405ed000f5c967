"""Sums the lanes' gradients in one process."""

import torch
from torch import nn

from lanewise.lanes import LaneTurn
from lanewise.reduce.pending import PendingGradients
from lanewise.reduce.reducer import Reducer


class SingleReducer(Reducer):
    """One process carries all lanes: nothing travels.

    Args:
        model: the user's module.
        num_lanes: lanes of the run.
        exact: add in the tree, at the price of ceil(log2(num_lanes)) further copies of the gradients;
            otherwise autograd adds lane after lane.
    """

    def __init__(self, model: nn.Module, num_lanes: int, *, exact: bool) -> None:
        super().__init__(model)
        self._pending = PendingGradients(self.parameters, num_lanes) if exact else None

    def backward(self, turn: LaneTurn, connected: torch.Tensor) -> None:
        """See `Reducer`."""
        connected.backward()
        if self._pending is not None:
            self._pending.push(turn)

    def finish(self, weight: float) -> None:
        """See `Reducer`."""
        if self._pending is not None:
            self._pending.restore_root()
        super().finish(weight)
