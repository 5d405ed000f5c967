"""Sums the lanes' gradients in one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lanewise.lanes import LaneTurn
from lanewise.reduce.pending import PendingGradients
from lanewise.reduce.reducer import LaneWork, divide_gradients, reach_all


class SingleReducer:
    """One process carries all lanes: nothing travels.

    Args:
        model: the user's module.
        num_lanes: lanes of the run.
        exact: add in the tree, at the price of ceil(log2(num_lanes)) further copies of the gradients;
            otherwise autograd adds lane after lane.
    """

    def __init__(self, model: nn.Module, num_lanes: int, *, exact: bool) -> None:
        self.replicas: Sequence[nn.Module] = [model]
        self.parameters: Sequence[nn.Parameter] = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._pending = PendingGradients(self.parameters, num_lanes) if exact else None

    def run(self, lanes: Sequence[LaneWork]) -> list[Any]:
        """See `Reducer`."""
        return [lane.run(self.replicas[0]) for lane in lanes]

    def connect(self, turn: LaneTurn, loss_sum: torch.Tensor | None) -> torch.Tensor:
        """See `Reducer`."""
        return reach_all(loss_sum, self.parameters)

    def backward(self, turn: LaneTurn, connected: torch.Tensor) -> None:
        """See `Reducer`."""
        connected.backward()
        if self._pending is not None:
            self._pending.push(turn)

    def finish(self, weight: float) -> None:
        """See `Reducer`."""
        if self._pending is not None:
            self._pending.restore_root()
        divide_gradients(self.parameters, weight)

    def close(self) -> None:
        """See `Reducer`."""
