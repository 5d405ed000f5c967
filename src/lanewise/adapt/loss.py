"""How much a loss weighs: looks at micro-batches to find out over what it is a mean."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_MAX_SAMPLES, _NUM_BATCHES = 8, 4
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 3e-2
"""Relative difference beyond which two losses differ; the second one for weights of less than 32 bits."""


@contextmanager
def looking(model: nn.Module) -> Iterator[Callable[[float, Sequence[float]], bool]]:
    """Compute without gradients and dropout, and leave the mode and torch's random state as they were.

    Yields:
        What tells whether a loss sum of a micro-batch is, within rounding, what its samples add up to.
    """
    is_half = any(parameter.element_size() < 4 for parameter in model.parameters())
    tolerance = _TOLERANCE_OF_HALF if is_half else _TOLERANCE

    def is_sum_of_parts(whole: float, parts: Sequence[float]) -> bool:
        size = max(abs(whole), sum(map(abs, parts)), 1e-30)
        return abs(whole - sum(parts)) <= tolerance * size

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield is_sum_of_parts
    finally:
        for module, is_training in modes:
            module.training = is_training


def first_samples(dataset: Any, micro_batch_size: int) -> Iterator[list[Any]]:
    """Yield the samples of a few micro-batches of at most 8 samples, from the beginning of a dataset."""
    size = min(micro_batch_size, _MAX_SAMPLES)
    end = min(len(dataset), _NUM_BATCHES * size)
    for start in range(0, end, size):
        yield [dataset[index] for index in range(start, min(start + size, end))]


def rows(batch: Any, num_samples: int, row: int) -> Any:
    """Return a sample of a micro-batch, as a micro-batch with the same padding.

    Args:
        batch: tensors in nested containers.
        num_samples: of the micro-batch; what has another first dimension belongs to all of them.
        row: which sample.
    """
    if isinstance(batch, Mapping):
        return {name: rows(value, num_samples, row) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(rows(value, num_samples, row) for value in batch))
    if isinstance(batch, torch.Tensor) and batch.dim():
        return batch[row : row + 1] if len(batch) == num_samples else batch
    if isinstance(batch, list | tuple):
        is_of_samples = len(batch) == num_samples and not any(map(_is_container, batch))
        if is_of_samples:
            return batch[row : row + 1]
        return type(batch)(rows(value, num_samples, row) for value in batch)
    return batch


def _is_container(value: Any) -> bool:
    return isinstance(value, torch.Tensor | Mapping | list | tuple)
