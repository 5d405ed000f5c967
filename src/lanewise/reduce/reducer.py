"""The interface of all reducers, and the code that several of them share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lanewise.config import Equality
from lanewise.data import LaneBatch
from lanewise.lanes import LaneTurn, Present
from lanewise.reduce.all_reduce import AllReduce
from lanewise.reduce.pending import PendingGradients, zero_gradient

T = TypeVar("T")


class LaneWork(Protocol):
    """The computation of one lane in a step, for a reducer to run on any module and device."""

    batch: LaneBatch
    """On the device of the first replica.

    Without samples its data are None, or those of another lane, for a forward that does not count. It may
    have none although its turn has positions: all unreadable.
    """

    def forward(self, model: nn.Module, data: Any) -> Any:
        """Return the outputs of a module for a batch, under the lane's random state."""

    def loss(self, outputs: Any, data: Any) -> Any:
        """Return the loss; its random numbers continue those of the forward."""


Lane = TypeVar("Lane", bound=LaneWork)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def forget_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set every `grad` to None."""
    for parameter in parameters:
        parameter.grad = None


def kept_gradients(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Return a function that gives every parameter a copy of the gradient that it has now."""
    kept = [(one, None if one.grad is None else one.grad.clone()) for one in parameters]

    def put_back() -> None:
        for parameter, gradient in kept:
            parameter.grad = None if gradient is None else gradient.clone()

    return put_back


def without_loss(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return a scalar whose backward gives no parameter a gradient."""
    return torch.zeros((), device=parameters[0].device, requires_grad=True)


def run_backward(loss: torch.Tensor, factor: torch.Tensor | None) -> None:
    """Do the same as `loss.backward(factor)`, but faster.

    torch's method checks its arguments, which took 28 of the 217 us of a small model's micro-batch.
    """
    if factor is None or type(loss) is not torch.Tensor or _engine is None:
        loss.backward(factor)
    else:  # the arguments are the defaults of `backward`
        _engine((loss,), (factor,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# Not public. If a version of torch does not have it, `run_backward` calls `loss.backward`.
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
    _module: nn.Module, lanes: Iterable[Lane], _num_lanes: int | None, compute: Callable[[Lane, Any], T]
) -> Iterator[tuple[Lane, T]]:
    """The `Reducer.evaluate` of reducers whose forwards are not collective."""
    for lane in lanes:
        if lane.batch.has_samples:
            yield lane, compute(lane, lane.batch.data)


class Reducer(ABC):
    """Sums the gradients of a step's lanes over all processes.

    A step goes through `rounds`, each of which has as many lanes as there are replicas: `run` runs their
    forwards and losses, then `backward` is called for each of them, in lane order. At the end it calls
    `finish`. Communication happens in the backward of the last lane (`turn.is_last`), which it overlaps,
    and in `finish`. With one replica:

        run(lane 0)  backward(lane 0)  run(lane 1)  backward(lane 1)         finish
                                                    |- buckets travel ...... |

    The user's own loop does not call `run`, but computes the losses itself.

    What is not abstract is how reducers do it which hold the whole model on each device.

    Args:
        model: the user's module.
        num_lanes: lanes of the run.
        equality: in `exact`, gradients are kept lane by lane until they are added in the tree.
    """

    model: nn.Module
    """The user's own."""
    replicas: Sequence[nn.Module]
    """The modules on which the lanes of a round run at once: the model, and its copies."""
    parameters: Sequence[nn.Parameter]
    """The trained parameters."""
    forward_is_collective: bool
    """Whether a process waits in a forward for the others, so that all must run equally many forwards."""
    runs_at_once = False
    """Whether the lanes of a round run in threads, which share the generators of the host."""

    _num_processes = 1
    _all_reduce: AllReduce | None = None
    """Sums over processes; under fsdp opened when it is first needed, as gradients travel in other ways."""
    _open_all_reduce: Callable[[], AllReduce]

    def __init__(self, model: nn.Module, num_lanes: int, equality: Equality) -> None:
        self.model, self.replicas = model, [model]
        self.parameters = trained_parameters(model)
        self.forward_is_collective = False
        self._num_lanes, self._is_exact = num_lanes, equality == "exact"
        self._pending = PendingGradients(self.parameters, num_lanes) if self._is_exact else None

    def adopt(self, module: nn.Module) -> None:
        """Place another module like the model, such as its average, on the same devices in the same way."""
        module.to(self.parameters[0].device)

    def gathered_parameters(self) -> Mapping[torch.Tensor, str]:
        """Return the tensors that stand in a forward for parameters, where these are sharded, with names."""
        return {}

    def register_hooks(self, note: Callable[[str, torch.Tensor], None]) -> list[RemovableHandle]:
        """Call `note` with the name and tensor of a trained parameter after a lane's backward reached it."""
        return [
            parameter.register_post_accumulate_grad_hook(lambda reached, name=name: note(name, reached))
            for replica in self.replicas
            for name, parameter in replica.named_parameters()
            if parameter.requires_grad
        ]

    def rounds(self, batches: Iterator[LaneBatch]) -> Iterator[list[LaneBatch]]:
        """Yield the rounds of a step: the batches whose lanes run at once, one for each replica.

        Where forwards are collective, each process has equally many: batches without positions are added to
        them, whose results are discarded. `turn.is_last` is set for the very last batch only.

        Args:
            batches: consumed for one step.
        """
        num_at_once, in_round = len(self.replicas), []
        for batch in batches:
            in_round.append(batch)
            is_last = batch.turn.is_last
            del batch  # before the next one is read
            if is_last or len(in_round) == num_at_once:
                yield in_round
                in_round = []
            if is_last:
                return

    def run(self, lanes: Sequence[LaneWork], *, has_backward: bool = True) -> list[Any]:
        """Run forward and loss of the lanes of a round; None where one has no data.

        Collective where forwards are.

        Args:
            lanes: as many as `rounds` gave batches.
            has_backward: whether they get a backward; if not, no graph of theirs may be kept.
        """
        returned: list[Any] = []
        for lane in lanes:
            data = lane.batch.data
            has_data = data is not None or lane.batch.has_samples
            returned.append(lane.loss(lane.forward(self.model, data), data) if has_data else None)
        return returned

    def gathered(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which parameters that are in no block are whole, outside of a forward.

        Collective where forwards are: every rank must enter and leave it.

        Args:
            module: the model, or an adopted module.
        """
        return nullcontext()

    def whole(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which all parameters are whole, and no forward is collective.

        Collective where forwards are: every rank must enter it.

        Args:
            module: the model, or an adopted module, which runs without a backward.
        """
        return nullcontext()

    @abstractmethod
    def backward(self, turn: LaneTurn, loss: torch.Tensor | None, factor: torch.Tensor | None) -> None:
        """Add the gradients of a lane. Collective for the last lane of a step.

        Args:
            turn: the lane's turn; a lane without samples takes part, but contributes nothing.
            loss: scalar; the lane contributes `factor` times its gradient. None: it contributes nothing.
            factor: scalar that is passed to the backward, so that it needs no node in the graph; None if
                `loss` is None.
        """

    @abstractmethod
    def finish(self, weight: float) -> None:
        """Set every `param.grad` to the sum over all lanes, divided by `weight`. Collective."""

    def gradient_norms(self) -> torch.Tensor:
        """Return the L2 norm of each parameter's gradient, [num_parameters].

        Collective: every rank must call this.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return torch.stack(torch._foreach_norm(gradients))  # noqa: SLF001 - like `get_total_norm`

    def evaluate(
        self,
        module: nn.Module,
        lanes: Iterable[Lane],
        num_lanes: int | None,
        compute: Callable[[Lane, Any], T],
    ) -> Iterator[tuple[Lane, T]]:
        """Yield each lane that has samples, with the result of `compute` for it.

        Args:
            module: the model, or an adopted module, which `compute` runs without a backward.
            lanes: the lanes of this process; a single empty lane if it has none.
            num_lanes: the number of these lanes that have positions; None on every rank: nobody knows it.
            compute: returns the result for a lane and its batch.
        """
        return evaluate_lanes(module, lanes, num_lanes, compute)

    def sum_subtrees(self, sums: list[torch.Tensor], present: Present, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of a flat tensor over all lanes of a step, added as gradients are.

        Collective: every rank must call this.

        Args:
            sums: what this process's lanes come to in the tree; may be overwritten.
            present: the lanes that are in the step.
            flat: gives size and dtype where there are no sums; may be overwritten.
        """
        if self._num_processes == 1:
            (total,) = sums
            return total
        if self._all_reduce is None:
            self._all_reduce = self._open_all_reduce()
        if not self._is_exact:  # the addends are processes, each of which has one sum
            sums, present = [sum(sums, torch.zeros_like(flat))], range(self._num_processes)
        return self._all_reduce.start(sums, present, sums[-1] if sums else flat).wait()

    def close(self) -> None:
        """Stop the background work."""
        if self._all_reduce is not None:
            self._all_reduce.close()
