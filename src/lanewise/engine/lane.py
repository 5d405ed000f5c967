"""The loss of one lane's micro-batch, and its way to the device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lanewise.errors import TaskError
from lanewise.task import Loss, Task


@dataclass(frozen=True)
class LaneLoss:
    """A checked loss of one lane."""

    sum: torch.Tensor | None
    """Scalar, in training with a gradient; None where the weight is 0 and the lane contributes nothing."""
    weight: float
    is_sample_mean: bool
    """Whether the task returned a bare mean, which weighs as many units as there are samples."""

    @classmethod
    def compute(cls, task: Task, outputs: Any, data: Any, num_samples: int) -> "LaneLoss":
        """Run the task's loss on a lane's outputs.

        Raises:
            TaskError: if it is not a scalar with a weight of 0 or more, and in training a gradient.
        """
        returned: object = task.loss(outputs, data)
        is_sample_mean = isinstance(returned, torch.Tensor)
        loss: object = Loss.mean(returned, num_samples) if isinstance(returned, torch.Tensor) else returned
        if not isinstance(loss, Loss) or not _is_scalar(loss.sum):
            shape = getattr(getattr(loss, "sum", None), "shape", None)
            got = f"{returned!r:.60}" if shape is None else f"a tensor of shape {tuple(shape)}"
            raise TaskError(
                f"{type(task).__name__}.loss must return a scalar tensor or a Loss: got {got}. "
                "Return the mean over the micro-batch, or Loss(sum, weight) with the number of its units."
            )
        weight = float(loss.weight)
        if not 0 <= weight < math.inf:
            raise TaskError(
                f"{type(task).__name__}.loss returned the weight {weight}: need a finite one, not negative. "
                "It counts the units that were added up."
            )
        if weight and torch.is_grad_enabled() and not loss.sum.requires_grad:
            raise TaskError(
                f"{type(task).__name__}.loss returned a loss without a gradient: nothing would be trained. "
                "Compute it from the model's outputs, without detach(), item() or torch.no_grad()."
            )
        return cls(loss.sum.reshape(()) if weight else None, weight, is_sample_mean)


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def to_device(data: Any, device: torch.device) -> Any:
    """Move the tensors in nested containers; anything with a `.to(device)` moves itself."""
    if isinstance(data, torch.Tensor) or callable(getattr(data, "to", None)):
        return data.to(device)
    if isinstance(data, Mapping):
        return type(data)((key, to_device(value, device)) for key, value in data.items())  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    return data
