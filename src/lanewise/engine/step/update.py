"""How an optimizer updates the model: with a computed gradient, or by a closure that computes it."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch.optim import Optimizer

from lanewise.config.optimizer import needs_closure
from lanewise.data import LaneBatch
from lanewise.engine.step.batches import StepBatches
from lanewise.engine.step.gradient import StepGradient
from lanewise.errors import ConfigError, LanewiseError, text_of

Update: TypeAlias = Callable[[Iterator[LaneBatch]], StepGradient]
"""A function that consumes the batches of a step, and returns the gradient of the first pass over its lanes.

Collective: every rank must call it, with the batches of its own lanes.
"""


def choose_update(
    optimizer: Optimizer,
    compute_gradient: Update,
    seed_update: Callable[[int], None],
    *,
    closure: bool = False,
) -> Update:
    """Return the function that updates the model in a step.

    Args:
        optimizer: the optimizer of the model.
        compute_gradient: writes the gradient of a step to every `param.grad`, and seeds the update.
        seed_update: seeds the part of an update that comes before the first call of the closure.
        closure: whether the optimizer gets a closure besides the gradient.
    """
    if needs_closure(type(optimizer), is_asked=closure):
        return partial(_update_with_closure, optimizer, compute_gradient, seed_update, closure)

    def update(batches: Iterator[LaneBatch]) -> StepGradient:
        gradient = compute_gradient(batches)
        try:
            optimizer.step()  # does nothing where there is no gradient
        except Exception as error:
            _explain(error, optimizer)
            raise
        return gradient

    return update


def _update_with_closure(
    optimizer: Optimizer,
    compute_gradient: Update,
    seed_update: Callable[[int], None],
    begins_with_gradient: bool,
    batches: Iterator[LaneBatch],
) -> StepGradient:
    """Update with a closure, which LBFGS calls several times; each call makes a pass over the lanes.

    All passes use the same samples and random numbers, so that a line search evaluates one function. SAM
    finds the gradient before it calls the closure.
    """
    step_batches = StepBatches(batches)
    seed_update(step_batches.first.turn.step)
    found: list[StepGradient] = []

    def closure() -> torch.Tensor:
        found.append(compute_gradient(step_batches.copies()))
        return torch.tensor(found[-1].totals.loss, dtype=torch.float64)

    if begins_with_gradient:
        closure()
        if not found[0].allows_update:
            return found[0]
    try:
        optimizer.step(closure)  # type: ignore[arg-type]  # torch's says that it gives a float
    except Exception as error:
        _explain(error, optimizer, has_closure=True)
        raise
    return found[0]


def _explain(error: Exception, optimizer: Optimizer, *, has_closure: bool = False) -> None:
    """Say in words of the configuration what an optimizer lacks, where its error tells.

    Raises:
        ConfigError: if the optimizer needs a closure, or cannot update sharded parameters.
    """
    if isinstance(error, LanewiseError):  # in a pass over the lanes
        return
    name, said = type(optimizer).__name__, text_of(error)
    if not has_closure and re.search("closure", said, re.IGNORECASE):
        raise ConfigError(
            f"optimizer.class_path: {name} needs a closure: {said}. Set optimizer.closure=true."
        ) from error
    if re.search("DTensor|sharding", said, re.IGNORECASE):
        raise ConfigError(
            f"optimizer.class_path: {name} cannot update parameters that are sharded by "
            f"distributed.reducer fsdp: {said.splitlines()[0]}. Use another optimizer; or "
            "distributed.reducer=ddp, where shard_optimizer=true shares out whole parameters."
        ) from error
