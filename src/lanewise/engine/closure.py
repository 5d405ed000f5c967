"""Optimizers that ask for the gradient themselves, several times in a step: LBFGS searches along a line."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from lanewise.engine.gradient import StepGradient


def step_with_closure(optimizer: Optimizer, compute_gradient: Callable[[], StepGradient]) -> StepGradient:
    """Let an optimizer ask for the gradient of a step as often as it wants: a pass over the lanes each time.

    All passes have the same samples and random numbers, so a line search compares values of one function.

    Collective: every rank must call this.

    Args:
        optimizer: updates the model.
        compute_gradient: leaves the step's gradient in every `param.grad`, from the same batches each time.

    Returns:
        What the first pass found.
    """
    found: list[StepGradient] = []

    def closure() -> torch.Tensor:
        gradient = compute_gradient()
        found.append(gradient)
        return torch.tensor(gradient.totals.loss, dtype=torch.float64)

    optimizer.step(closure)  # type: ignore[arg-type]  # torch's says that it gives a float
    return found[0]
