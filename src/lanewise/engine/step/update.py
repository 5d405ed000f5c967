"""How an optimizer updates the model: with a computed gradient, or by a closure that computes it."""

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
"""A function that consumes the batches of a step, and returns the gradient of the first pass over its lanes.

Collective: every rank must call it, with the batches of its own lanes.
"""


def choose_update(
    optimizer: Optimizer, compute_gradient: Update, seed_update: Callable[[int], None]
) -> Update:
    """Return the function that updates the model in a step.

    Args:
        optimizer: the optimizer of the model.
        compute_gradient: writes the gradient of a step to every `param.grad`, and seeds the update.
        seed_update: seeds the part of an update that comes before the first call of the closure.
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
    """Update with a closure, which LBFGS calls several times; each call makes a pass over the lanes.

    All passes use the same samples and random numbers, so that a line search evaluates one function.
    """
    step_batches = StepBatches(batches)
    seed_update(step_batches.first.turn.step)
    found: list[StepGradient] = []

    def closure() -> torch.Tensor:
        found.append(compute_gradient(step_batches.copies()))
        return torch.tensor(found[-1].totals.loss, dtype=torch.float64)

    optimizer.step(closure)  # type: ignore[arg-type]  # torch's says that it gives a float
    return found[0]
