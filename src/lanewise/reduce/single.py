"""Sums the lanes' gradients in one process."""

from collections.abc import Callable
from typing import final

import torch
from torch import nn

from lanewise.config import Equality
from lanewise.lanes import LaneTurn
from lanewise.reduce.pending import PendingGradients
from lanewise.reduce.reducer import divide_gradients, run_backward, without_loss
from lanewise.reduce.whole_model import WholeModel


@final
class SingleReducer(WholeModel):
    """One process carries all lanes: nothing travels.

    Args:
        model: the user's module.
        num_lanes: lanes of the run.
        equality: `exact` adds in the tree, at the price of ceil(log2(num_lanes)) further copies of the
            gradients; in `close` autograd adds lane after lane.
    """

    def __init__(self, model: nn.Module, num_lanes: int, equality: Equality) -> None:
        super().__init__(model)
        self._pending = PendingGradients(self.parameters, num_lanes) if equality == "exact" else None

    def backward(
        self,
        turn: LaneTurn,
        loss: torch.Tensor | None,
        factor: torch.Tensor | None,
        exchange_totals: Callable[[], None],
    ) -> None:
        """See `Reducer`."""
        if turn.is_last:
            exchange_totals()
        run_backward(without_loss(self.parameters) if loss is None else loss, factor)
        if self._pending is not None:
            self._pending.push(turn)

    def finish(self, weight: float) -> None:
        """See `Reducer`."""
        if self._pending is not None:
            self._pending.restore_root()
        divide_gradients(self.parameters, weight)
