"""Sums the lanes' gradients in one process."""

from typing import final

import torch

from lanewise.lanes import LaneTurn
from lanewise.reduce.reducer import Reducer, divide_gradients, run_backward, without_loss


@final
class SingleReducer(Reducer):
    """The reducer of a single process with a single device, which carries all lanes: nothing is sent.

    Args:
        model: the user's module.
        num_lanes: number of lanes of the run.
        equality: `exact` adds in the tree, at the price of ceil(log2(num_lanes)) further copies of the
            gradients; in `close` autograd adds lane after lane.
    """

    def backward(self, turn: LaneTurn, loss: torch.Tensor | None, factor: torch.Tensor | None) -> None:
        run_backward(without_loss(self.parameters) if loss is None else loss, factor)
        if self._pending is not None:
            self._pending.push(turn)

    def finish(self, weight: float) -> None:
        if self._pending is not None:
            self._pending.restore_root()
        divide_gradients(self.parameters, weight)
