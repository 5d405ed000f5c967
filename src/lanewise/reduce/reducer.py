"""What the engine asks of every reducer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lanewise.lanes import LaneTurn
from lanewise.reduce.pending import zero_gradient

T = TypeVar("T")


@dataclass(frozen=True)
class LaneWork:
    """The forward and the loss of one lane, to be run on whichever replica."""

    data: Any
    """The lane's batch, on the device of the first replica."""
    set_random_state: Callable[[], None]
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Any]
    """From outputs and batch."""
    context: Callable[[], AbstractContextManager[object]]
    """Entered around both: the number format."""
    move: Callable[[Any, torch.device], Any]
    """Puts a batch or outputs on a device, in whichever containers they are."""

    def run(self, model: nn.Module) -> Any:
        """Return the loss, computed where the batch is."""
        self.set_random_state()
        with self.context():
            return self.loss(self.forward(model, self.data), self.data)


class Reducer(ABC):
    """Sums the gradients of a step's lanes over all processes.

    Within a step the engine calls `run` for each group of lanes, one for each replica, and then, in lane
    order, `connect` and `backward` for each lane of it; at last `finish`. Communication happens in the
    backward of the last lane (`turn.is_last`), overlapping it, and in `finish`. One replica:

        connect(lane 0)  backward(lane 0)  connect(lane 1)  backward(lane 1)         finish
                                                            |- buckets travel ...... |

    Args:
        model: the user's module.
    """

    forward_is_collective = False
    """Whether a forward talks, so that every rank must run equally many."""

    def __init__(self, model: nn.Module) -> None:
        self.replicas: Sequence[nn.Module] = [model]
        """The modules on which the lanes of a group run at once; the first is the user's own."""
        self.parameters: Sequence[nn.Parameter] = trained_parameters(model)
        """What is trained."""

    def adopt(self, module: nn.Module) -> None:
        """Put another module of the same kind, such as an average of the model, where the model is."""
        module.to(self.parameters[0].device)

    def watch(self, note: Callable[[str, torch.Tensor], None]) -> list[RemovableHandle]:
        """Have each trained parameter, by its name, shown after a lane's backward."""
        return [
            parameter.register_post_accumulate_grad_hook(lambda one, name=name: note(name, one))
            for replica in self.replicas
            for name, parameter in replica.named_parameters()
            if parameter.requires_grad
        ]

    def run(self, lanes: Sequence[LaneWork]) -> list[Any]:
        """Compute the losses of a group of lanes, at most one for each replica."""
        return [lane.run(self.replicas[0]) for lane in lanes]

    def call(self, module: nn.Module, function: Callable[[], T]) -> T:
        """Call a function that runs the model, or an adopted module, outside of training."""
        return function()

    def connect(self, turn: LaneTurn, loss_sum: torch.Tensor | None) -> torch.Tensor:
        """Return the scalar for `backward`. Collective for the last lane of a step.

        Args:
            turn: the lane's turn; one without samples takes part with nothing.
            loss_sum: scalar, the sum of the lane's loss; None where the lane contributes nothing.
        """
        if loss_sum is not None:
            return loss_sum
        return torch.zeros((), device=self.parameters[0].device, requires_grad=True)

    @abstractmethod
    def backward(self, turn: LaneTurn, connected: torch.Tensor) -> None:
        """Add the gradients of a lane. Collective for the last lane of a step."""

    def finish(self, weight: float) -> None:
        """Leave in every `param.grad` the sum over all lanes, divided by `weight`."""
        divide_gradients(self.parameters, weight)

    def grad_norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole gradient, a scalar. Collective: every rank must call this."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def close(self) -> None:  # noqa: B027 - most have nothing to stop
        """Stop what runs in the background."""


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def divide_gradients(parameters: Sequence[nn.Parameter], weight: float) -> None:
    """Divide every gradient by the weight of the global batch; a step's divisor is applied only here."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:  # no lane used it
            parameter.grad = zero_gradient(parameter)
        else:
            gradients.append(parameter.grad)
    if gradients:
        torch._foreach_div_(gradients, weight)
