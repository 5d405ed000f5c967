"""Sums the lanes' gradients in one process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lanewise.config import Equality
from lanewise.lanes import LaneTurn
from lanewise.reduce.pending import PendingGradients
from lanewise.reduce.reducer import (
    Lane,
    LaneWork,
    T,
    divide_gradients,
    evaluate_lanes,
    loss_of,
    norm_of_gradients,
    register_parameter_hooks,
    trained_parameters,
    without_loss,
)


@final
class SingleReducer:
    """One process carries all lanes: nothing travels.

    Args:
        model: the user's module.
        num_lanes: lanes of the run.
        equality: `exact` adds in the tree, at the price of ceil(log2(num_lanes)) further copies of the
            gradients; in `close` autograd adds lane after lane.
    """

    def __init__(self, model: nn.Module, num_lanes: int, equality: Equality) -> None:
        self.replicas: Sequence[nn.Module] = [model]
        self.parameters: Sequence[nn.Parameter] = trained_parameters(model)
        self._pending = PendingGradients(self.parameters, num_lanes) if equality == "exact" else None

    def adopt(self, module: nn.Module) -> None:
        """See `Reducer`."""
        module.to(self.parameters[0].device)

    def register_hooks(self, note: Callable[[str, torch.Tensor], None]) -> list[RemovableHandle]:
        """See `Reducer`."""
        return register_parameter_hooks(self.replicas, note)

    def pad(self, batches: Iterator[Any]) -> Iterator[Any]:
        """See `Reducer`."""
        return batches

    def losses(self, lanes: Sequence[LaneWork]) -> list[Any]:
        """See `Reducer`."""
        return [loss_of(lane, self.replicas[0]) for lane in lanes]

    def backward(
        self, turn: LaneTurn, loss_sum: torch.Tensor | None, exchange_totals: Callable[[], None]
    ) -> None:
        """See `Reducer`."""
        if turn.is_last:
            exchange_totals()
        (without_loss(self.parameters) if loss_sum is None else loss_sum).backward()
        if self._pending is not None:
            self._pending.push(turn)

    def finish(self, weight: float) -> None:
        """See `Reducer`."""
        if self._pending is not None:
            self._pending.restore_root()
        divide_gradients(self.parameters, weight)

    def grad_norm(self) -> torch.Tensor:
        """See `Reducer`."""
        return norm_of_gradients(self.parameters)

    def evaluate(
        self,
        module: nn.Module,
        lanes: Iterable[Lane],
        num_lanes: int,
        compute: Callable[[Lane, Any], T],
        wants_stop: Callable[[], bool],
    ) -> Iterator[tuple[Lane, T]]:
        """See `Reducer`."""
        return evaluate_lanes(lanes, compute, wants_stop)

    def close(self) -> None:
        """See `Reducer`."""
