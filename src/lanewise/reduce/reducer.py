"""What the engine asks of every reducer, and what several reducers do alike."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lanewise.lanes import LaneTurn
from lanewise.reduce.pending import zero_gradient

T = TypeVar("T")


class LaneWork(Protocol):
    """What one lane computes in a step, on whichever module and device it is given."""

    @property
    def turn(self) -> LaneTurn:
        """The lane's turn."""
        ...

    @property
    def data(self) -> Any:
        """The lane's batch, on the device of the first replica; None where there are no samples."""
        ...

    @property
    def has_samples(self) -> bool:
        """Whether the batch has samples. A lane whose turn has positions may have lost them all."""
        ...

    def forward(self, model: nn.Module, data: Any) -> Any:
        """Return the outputs of a module for a batch, under the lane's random state."""
        ...

    def loss(self, outputs: Any, data: Any) -> Any:
        """Return the loss; it goes on with the random numbers of the forward."""
        ...


Lane = TypeVar("Lane", bound=LaneWork)


class Reducer(Protocol):
    """Sums the gradients of a step's lanes over all processes.

    In a step the engine calls `losses` for each round of lanes, one for each replica, and then, in lane
    order, `backward` for each lane of it; at last `finish`. Communication happens in the backward of the last
    lane (`turn.is_last`), overlapping it, and in `finish`. One replica:

        losses(lane 0)  backward(lane 0)  losses(lane 1)  backward(lane 1)         finish
                                                          |- buckets travel ...... |

    The user's own loop computes the losses by itself.
    """

    replicas: Sequence[nn.Module]
    """The modules on which the lanes of a round run at once; the first is the user's own."""
    parameters: Sequence[nn.Parameter]
    """What is trained."""
    forward_is_collective: bool
    """Whether a process waits in a forward for the others, so that all must run equally many."""

    def adopt(self, module: nn.Module) -> None:
        """Put another module of the same kind, such as an average of the model, where the model is."""
        ...

    def register_hooks(self, note: Callable[[str, torch.Tensor], None]) -> list[RemovableHandle]:
        """Have each trained parameter, by its name, shown after a lane's backward."""
        ...

    def pad(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a step, and more where this process has too few for a collective forward.

        Nothing of the further ones counts: their turns have no positions. `turn.is_last` is that of the last
        one of all.

        Args:
            batches: `LaneBatch`es, consumed for one step.
        """
        ...

    def losses(self, lanes: Sequence[LaneWork]) -> list[Any]:
        """Compute the losses of a round of lanes, at most one for each replica; None for an empty lane."""
        ...

    def backward(self, turn: LaneTurn, loss: torch.Tensor | None, factor: torch.Tensor | None) -> None:
        """Add the gradients of a lane. Collective for the last lane of a step.

        Args:
            turn: the lane's turn; one without samples takes part with nothing.
            loss: scalar, of which the lane contributes `factor` times the gradient; None for nothing.
            factor: scalar, given to the backward, where it costs no node of the graph; None for no loss.
        """
        ...

    def finish(self, weight: float) -> None:
        """Leave in every `param.grad` the sum over all lanes, divided by `weight`. Collective."""
        ...

    def grad_norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole gradient, a scalar. Collective: every rank must call this."""
        ...

    def gradient_norms(self) -> torch.Tensor:
        """Return the L2 norm of each parameter's gradient, [num_parameters]. Collective, as `grad_norm`."""
        ...

    def evaluate(
        self,
        module: nn.Module,
        lanes: Iterable[Lane],
        num_lanes: int,
        compute: Callable[[Lane, Any], T],
    ) -> Iterator[tuple[Lane, T]]:
        """Yield what is computed, without gradients, for each lane that has samples.

        Args:
            module: the model, or an adopted module, which `compute` runs.
            lanes: of this process; one without samples if it has none.
            num_lanes: how many of them have samples.
            compute: from a lane and its batch to whatever is wanted.
        """
        ...

    def close(self) -> None:
        """Stop what runs in the background."""
        ...


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def without_loss(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return a scalar whose backward gives no parameter a gradient."""
    return torch.zeros((), device=parameters[0].device, requires_grad=True)


def run_backward(loss: torch.Tensor, factor: torch.Tensor | None) -> None:
    """Do what `loss.backward(factor)` does.

    That checks the arguments of all its uses, which took 28 of the 217 us of a small model's micro-batch.
    """
    if factor is None or type(loss) is not torch.Tensor or _engine is None:
        loss.backward(factor)
    else:  # retain_graph, create_graph and inputs are its defaults
        _engine((loss,), (factor,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# Not public; where a version of torch has it no more, the long way is taken.
_engine: Callable[..., object] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)


def divide_gradients(parameters: Sequence[nn.Parameter], weight: float) -> None:
    """Divide every gradient, and give zeros to parameters that no lane used."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:  # no lane used it
            parameter.grad = zero_gradient(parameter)
        else:
            gradients.append(parameter.grad)
    if gradients and weight != 1.0:
        torch._foreach_div_(gradients, weight)


def evaluate_lanes(
    _module: nn.Module,
    lanes: Iterable[Lane],
    _num_lanes: int,
    compute: Callable[[Lane, Any], T],
) -> Iterator[tuple[Lane, T]]:
    """Do what `Reducer.evaluate` does where a forward asks nothing of other processes."""
    for lane in lanes:
        if lane.has_samples:
            yield lane, compute(lane, lane.data)


class WholeModel:
    """The part of a `Reducer` that does not depend on how gradients travel.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.replicas: Sequence[nn.Module] = [model]
        self.parameters: Sequence[nn.Parameter] = trained_parameters(model)
        self.forward_is_collective = False

    def adopt(self, module: nn.Module) -> None:
        """See `Reducer`."""
        module.to(self.parameters[0].device)

    def register_hooks(self, note: Callable[[str, torch.Tensor], None]) -> list[RemovableHandle]:
        """See `Reducer`."""
        return [
            parameter.register_post_accumulate_grad_hook(lambda one, name=name: note(name, one))
            for replica in self.replicas
            for name, parameter in replica.named_parameters()
            if parameter.requires_grad
        ]

    def pad(self, batches: Iterator[Any]) -> Iterator[Any]:
        """See `Reducer`."""
        return batches

    def losses(self, lanes: Sequence[LaneWork]) -> list[Any]:
        """See `Reducer`."""
        (model,), (lane,) = self.replicas, lanes
        if not lane.has_samples:
            return [None]
        data = lane.data
        return [lane.loss(lane.forward(model, data), data)]

    def grad_norm(self) -> torch.Tensor:
        """See `Reducer`."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.gradient_norms())
        return norm

    def gradient_norms(self) -> torch.Tensor:
        """See `Reducer`."""
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        return torch.stack(torch._foreach_norm(gradients))  # noqa: SLF001 - as `get_total_norm` does it

    evaluate = staticmethod(evaluate_lanes)

    def close(self) -> None:
        """See `Reducer`."""
