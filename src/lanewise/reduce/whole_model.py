"""What the reducers have in common whose processes hold whole modules, so that a forward asks nobody else."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lanewise.reduce.reducer import Lane, LaneWork, T, evaluate_lanes, trained_parameters


class WholeModel:
    """The part of a `Reducer` that does not depend on how gradients travel.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.replicas: Sequence[nn.Module] = [model]
        self.parameters: Sequence[nn.Parameter] = trained_parameters(model)

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
