"""Backwards that come to tensors which a loss did not use."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch


def reach_all(loss_sum: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make every tensor an input of the loss, so that backward reaches each of them.

    What the loss did not use gets an undefined gradient through this node, at no cost.

    Args:
        loss_sum: the lane's loss; None makes a loss that gives no gradient to any tensor.
        tensors: what is to be reached.
    """
    if loss_sum is None:
        loss_sum = tensors[0].new_zeros(())
    connected: torch.Tensor = _Reach.apply(loss_sum, *tensors)  # type: ignore[no-untyped-call]
    return connected


class _Reach(torch.autograd.Function):
    """The identity on its first argument; the others receive undefined gradients."""

    @staticmethod
    def forward(ctx: Any, loss_sum: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.num_tensors = len(tensors)
        return loss_sum.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (gradients[0], *[None] * ctx.num_tensors)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returned, in whichever containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(tensors_in, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(tensors_in, value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from chain.from_iterable(tensors_in(getattr(value, field.name)) for field in fields(value))
