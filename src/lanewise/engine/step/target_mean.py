"""Finds in the graph of a loss the means over targets, which have another divisor in each micro-batch."""

from collections.abc import Iterator
from typing import Any

import torch

_MEANS = ("NllLossBackward0", "NllLoss2DBackward0")
"""The nodes of `cross_entropy` and `nll_loss`."""

RETURN_SUM = "Return lanewise.Loss(sum, weight), where the weight is what the mean is divided by."


def target_means(loss: torch.Tensor) -> Iterator[tuple[str, bool]]:
    """Yield of each mean over targets what it is divided by, and whether that is 0.

    The text is empty where each target of the micro-batch counts alike. Call it before the backward.
    """
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() not in _MEANS:
            waiting += [below for below, _ in node.next_functions]
        elif getattr(node, "_saved_reduction", 0) == 1:  # which stands for a mean
            weight, ignored = getattr(node, "_saved_weight", None), getattr(node, "_saved_ignore_index", 0)
            ignored -= 2**64 if ignored >= 2**63 else 0  # torch tells -100 without its sign
            is_ignored = getattr(node, "_saved_target", torch.empty(0)) == ignored
            over = "the targets that are not ignored" if is_ignored.any() else ""
            if weight is not None and weight.min() < weight.max():
                over = "its targets, weighted by class"
            yield over, not getattr(node, "_saved_total_weight", 1)
