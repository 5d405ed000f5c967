"""The gradients of the lanes that a process has completed in a step, added up in the tree."""

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from lanewise.lanes import LaneTurn, Node, Present, TreeSum


@final
class PendingGradients:
    """Moves each lane's gradients away from the parameters, and adds them as far as the tree allows.

    Gradients are kept by parameter, not by bucket, since DDP rebuilds its buckets after the first step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_lanes: int) -> None:
        self._parameters = parameters
        self._num_lanes = num_lanes
        self._sum: TreeSum[list[torch.Tensor]] | None = None

    def push(self, turn: LaneTurn, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Move the gradients of a lane's backward here; every `param.grad` is None afterwards.

        Args:
            turn: the lane's turn.
            parameters: the parameters with the gradients, if these are of a replica on another device.
        """
        gradients = []
        for own, parameter in zip(self._parameters, parameters or self._parameters, strict=True):
            # A lane that did not use the parameter adds +0.0, in every layout.
            gradient = zero_gradient(own) if parameter.grad is None else parameter.grad
            gradients.append(gradient.to(own.device))
            parameter.grad = None
        if self._sum is None:
            self._sum = new_tree_sum(self._num_lanes, turn.present)
        self._sum.push((turn.lane, turn.lane + 1), gradients)

    def restore_root(self) -> None:
        """Set every `param.grad` to the sum over all lanes, all of which must have been pushed."""
        assert self._sum is not None, "no lane was pushed"
        for parameter, gradient in zip(self._parameters, self._sum.root(), strict=True):
            parameter.grad = gradient
        self._sum = None

    def take(self) -> list[tuple[Node, dict[torch.Tensor, torch.Tensor]]]:
        """Return the sums so far, in lane order, and begin anew without them."""
        pending = [] if self._sum is None else self._sum.pending
        parameters: Sequence[torch.Tensor] = self._parameters
        self._sum = None
        return [(node, dict(zip(parameters, sums, strict=True))) for node, sums in pending]


def is_dense(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter fills its memory without gaps, in any order (transposed, channels_last).

    If so, autograd and DDP give its gradient the same strides. The gradient of any other parameter is
    contiguous.
    """
    # As documented, empty_like preserves only the strides of dense tensors.
    return parameter.is_contiguous() or (
        torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    )


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros with the strides that autograd would give a parameter's gradient."""
    order = torch.preserve_format if is_dense(parameter) else torch.contiguous_format
    return torch.zeros_like(parameter, memory_format=order)


def new_tree_sum(num_lanes: int, present: Present) -> TreeSum[list[torch.Tensor]]:
    """Return an empty sum of lists of tensors; each addition is done in place, in its right operand."""
    return TreeSum(num_lanes, present, add_into_right)


def add_into_right(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    """Add the left tensors to the right ones, in place, since the last right one may be a bucket of DDP."""
    torch._foreach_add_(right, left)
    return right
