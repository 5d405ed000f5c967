"""The losses of an evaluation, and what they report: sums and weights by name, for each micro-batch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from lanewise.engine.step.terms import LaneLoss, require_weight
from lanewise.engine.step.totals import means, sum_or_nan


class Losses(NamedTuple):
    """The sum and the weight of each micro-batch, of the loss and apart from it of what it reports."""

    terms: dict[str, list[tuple[float, float]]]
    """By the number of the term."""
    metrics: dict[str, list[tuple[float, float]]]
    """By the name that the user's code gives; any."""

    def note(self, terms: Sequence[LaneLoss]) -> None:
        """Note the terms of a micro-batch's loss, and what they report. Waits for the device.

        Raises:
            TaskError: if the weight of a metric is negative or not finite.
        """
        for number, term in enumerate(terms):
            pair = (0.0 if term.sum is None else term.sum.item(), term.weight)
            self.terms.setdefault(str(number), []).append(pair)
            for metric, (value, weight, _) in term.metrics.items():
                require_weight(metric, float(weight))
                self.metrics.setdefault(metric, []).append((float(value), float(weight)))

    def sent(self) -> list[dict[str, torch.Tensor]]:
        """Return them as float64, [num_micro_batches, 2], which are sent faster than lists."""
        return [{key: torch.tensor(rows, dtype=torch.float64) for key, rows in kind.items()} for kind in self]


def merge_losses(lanes: Iterable[Sequence[Mapping[str, torch.Tensor]]]) -> dict[str, float]:
    """Return the mean loss over all lanes as `loss`, added up over its terms, and of what they report.

    A mean is NaN where a sum is not finite, or the weight is 0. Of several terms, those without a unit in any
    lane are left out, as in training. Where no lane has a loss there is no `loss`.

    Args:
        lanes: for each lane what `Losses.sent` returned.
    """
    terms, metrics = map(_sums, zip(*lanes, strict=True))
    with_units = {number: sums for number, sums in terms.items() if sums[1]}
    loss = {"loss": math.fsum(means(with_units or terms).values())} if terms else {}
    return loss | means(metrics)


def _sums(lanes: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, tuple[float, float]]:
    pairs: dict[str, list[tuple[float, float]]] = {}
    for lane in lanes:
        for name, of_lane in lane.items():
            pairs.setdefault(name, []).extend(of_lane.tolist())
    sums: dict[str, tuple[float, float]] = {}
    for name, found in sorted(pairs.items()):
        values, weights = zip(*found, strict=True)
        sums[name] = sum_or_nan(values), sum_or_nan(weights)
    return sums
