"""Connects tensors to a loss that did not use them, so that its backward passes through them."""

from collections.abc import Sequence
from typing import Any, final

import torch


def connect(loss_sum: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss with every tensor as an input.

    A tensor that the loss did not use gets an undefined gradient through this node, at no cost.

    Args:
        loss_sum: the lane's loss; None: the result is a loss that gives no gradient to any tensor.
        tensors: the tensors to connect.
    """
    if loss_sum is None:
        loss_sum = tensors[0].new_zeros(())
    connected: torch.Tensor = _Connect.apply(loss_sum, *tensors)  # type: ignore[no-untyped-call]
    return connected


@final
class _Connect(torch.autograd.Function):
    """The identity on its first argument; the others receive undefined gradients."""

    @staticmethod
    def forward(ctx: Any, loss_sum: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.num_tensors = len(tensors)
        return loss_sum.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (gradients[0], *[None] * ctx.num_tensors)
