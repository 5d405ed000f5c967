"""How much a loss weighs: looks at micro-batches to find out over what it is a mean."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lanewise.processes.device.nested import map_leaves

_NUM_SAMPLES, _MOST_AT_ONCE = 64, 8
_CONTAINER = (torch.Tensor, Mapping, list, tuple)
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 3e-2
"""Relative difference beyond which two losses differ; the second one for weights of less than 32 bits."""


@final
class LossObserver(TorchFunctionMode):
    """Notes in its context where torch's losses are told what makes their mean none over all targets.

    Samples of one class, or without a target that is ignored, do not show it.

    Args:
        model: whose losses are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        is_half = any(parameter.element_size() < 4 for parameter in model.parameters())
        self._tolerance = _TOLERANCE_OF_HALF if is_half else _TOLERANCE
        self.reasons: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        given = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss, F.mse_loss) and given.get("reduction") == "mean":
            weight, ignored = given.get("weight"), given.get("ignore_index", -100)
            if weight is not None and not (weight == weight.flatten()[0]).all():
                self.reasons.append(f", as its {func.__name__} has a weight")
            # The first two are conventions, which samples show, and the last is what is clamped to the end.
            elif ignored not in (-100, 255, *args[0].shape[1:2]):
                self.reasons.append(f", as its {func.__name__} has ignore_index={ignored}")
        return func(*args, **given)

    def is_sum_of_parts(self, whole: float, parts: Sequence[float]) -> bool:
        """Tell whether a loss sum of a micro-batch is, within rounding, what its samples add up to."""
        size = max(abs(whole), sum(map(abs, parts)), 1e-30)
        return abs(whole - sum(parts)) <= self._tolerance * size


def spread_samples(dataset: Any, micro_batch_size: int) -> Iterator[list[Any]]:
    """Yield 64 samples in micro-batches of at most 8, the same ones each time, from anywhere in a dataset.

    It may be sorted by class, or its classes take turns.
    """
    size = min(micro_batch_size, _MOST_AT_ONCE)
    indices = random.Random(0).sample(range(len(dataset)), min(len(dataset), _NUM_SAMPLES))
    for start in range(0, len(indices), size):
        yield [dataset[index] for index in indices[start : start + size]]


def rows(batch: Any, num_samples: int, row: int) -> Any:
    """Return a sample of a micro-batch, as a micro-batch with the same padding.

    Args:
        batch: tensors and lists in nested containers.
        num_samples: of the micro-batch; what has another first dimension belongs to all of them.
        row: which sample.
    """

    def is_leaf(value: Any) -> bool:
        is_flat = type(value) in (list, tuple) and not any(isinstance(part, _CONTAINER) for part in value)
        return isinstance(value, torch.Tensor) or is_flat

    def cut(leaf: Any) -> Any:
        return leaf[row : row + 1] if getattr(leaf, "ndim", 1) and len(leaf) == num_samples else leaf

    return map_leaves(cut, batch, is_leaf)
