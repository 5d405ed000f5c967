"""Optimizers that ask for the gradient themselves, several times in a step: LBFGS searches along a line."""

from collections.abc import Callable, Iterator

import torch
from torch.optim import Optimizer

from lanewise.data import LaneBatch
from lanewise.engine.gradient import StepGradient
from lanewise.engine.step_batches import StepBatches


def step_with_closure(
    optimizer: Optimizer,
    batches: Iterator[LaneBatch],
    compute_gradient: Callable[[Iterator[LaneBatch]], StepGradient],
) -> StepGradient:
    """Let an optimizer ask for the gradient of a step as often as it wants: a pass over the lanes each time.

    All passes have the same samples and random numbers, so a line search compares values of one function.

    Collective: every rank must call this.

    Args:
        optimizer: updates the model.
        batches: of this process; consumed for one step.
        compute_gradient: leaves the gradient in every `param.grad`.

    Returns:
        What the first pass found.
    """
    step_batches = StepBatches(batches, copies=True)
    found: list[StepGradient] = []

    def closure() -> torch.Tensor:
        gradient = compute_gradient(iter(step_batches))
        found.append(gradient)
        return torch.tensor(gradient.totals.loss, dtype=torch.float64)

    optimizer.step(closure)  # type: ignore[arg-type]  # torch's says that it gives a float
    return found[0]
