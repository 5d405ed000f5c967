"""How an optimizer updates the model: with a gradient that is there, or by asking for it itself."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch.optim import Optimizer

from lanewise.config.optimizer import needs_closure
from lanewise.data import LaneBatch
from lanewise.engine.step.batches import StepBatches
from lanewise.engine.step.gradient import StepGradient

Update: TypeAlias = Callable[[Iterator[LaneBatch]], StepGradient]
"""Takes the batches of a step, updates the model, and returns what the first pass over the lanes found.

Collective: every rank must call it, with the batches of its own lanes.
"""


def choose_update(
    optimizer: Optimizer, compute_gradient: Update, seed_update: Callable[[int], None]
) -> Update:
    """Return what updates the model in a step.

    Args:
        optimizer: of the model.
        compute_gradient: leaves the gradient of a step in every `param.grad`, and seeds the update.
        seed_update: seeds what comes before the optimizer asks for the gradient of a step.
    """
    if needs_closure(type(optimizer)):
        return partial(_update_with_closure, optimizer, compute_gradient, seed_update)

    def update(batches: Iterator[LaneBatch]) -> StepGradient:
        gradient = compute_gradient(batches)
        optimizer.step()  # does nothing where there is no gradient
        return gradient

    return update


def _update_with_closure(
    optimizer: Optimizer,
    compute_gradient: Update,
    seed_update: Callable[[int], None],
    batches: Iterator[LaneBatch],
) -> StepGradient:
    """Let an optimizer ask for the gradient, as LBFGS does it several times: a pass over the lanes each time.

    All passes have the same samples and random numbers, so a line search compares values of one function.
    """
    step_batches = StepBatches(batches, copies=True)
    seed_update(next(iter(step_batches)).turn.step)
    found: list[StepGradient] = []

    def closure() -> torch.Tensor:
        found.append(compute_gradient(iter(step_batches)))
        return torch.tensor(found[-1].totals.loss, dtype=torch.float64)

    optimizer.step(closure)  # type: ignore[arg-type]  # torch's says that it gives a float
    return found[0]
