"""The losses of an evaluation, and what they report: sums and weights by name, for each micro-batch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from lanewise.engine.step.message import means, sum_or_nan
from lanewise.engine.step.terms import LaneLoss, require_weight

Pairs: TypeAlias = dict[str, list[tuple[float, float]]]
"""The sum and the weight of each micro-batch, by name."""

_LOSS = "loss"
"""The name of the loss; of one with several terms each has a number behind it."""


def note_losses(terms: Sequence[LaneLoss], losses: Pairs) -> None:
    """Note the terms of a micro-batch's loss, and what they report. Waits for the device.

    Raises:
        TaskError: if the weight of a metric is negative or not finite.
    """
    for number, term in enumerate(terms):
        name = _LOSS if len(terms) == 1 else f"{_LOSS} {number}"
        losses.setdefault(name, []).append((0.0 if term.sum is None else term.sum.item(), term.weight))
        for metric, (value, weight, _) in term.metrics.items():
            require_weight(metric, float(weight))
            losses.setdefault(metric, []).append((float(value), float(weight)))


def as_tensors(losses: Pairs) -> dict[str, torch.Tensor]:
    """Return the sums and weights as float64, [num_micro_batches, 2], which are sent faster than lists."""
    return {name: torch.tensor(pairs, dtype=torch.float64) for name, pairs in losses.items()}


def merge_losses(lanes: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the mean loss over all lanes as `loss`, added up over its terms, and of what they report.

    A mean is NaN where a sum is not finite, or the weight is 0. Where no lane has a loss there is no `loss`.

    Args:
        lanes: for each lane what `as_tensors` returned.
    """
    pairs: Pairs = {}
    for lane in lanes:
        for name, of_lane in lane.items():
            pairs.setdefault(name, []).extend(of_lane.tolist())
    averages = means(
        {
            name: (sum_or_nan(value for value, _ in found), sum_or_nan(weight for _, weight in found))
            for name, found in sorted(pairs.items())
        }
    )
    terms = [mean for name, mean in averages.items() if name.partition(" ")[0] == _LOSS]
    others = {name: mean for name, mean in averages.items() if name.partition(" ")[0] != _LOSS}
    return ({_LOSS: math.fsum(terms)} if terms else {}) | others
