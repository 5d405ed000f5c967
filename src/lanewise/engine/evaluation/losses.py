"""The losses of an evaluation, and what they report: sums and weights by name, for each micro-batch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from lanewise.engine.step.loss_metrics import means_of_lanes, read_terms
from lanewise.engine.step.terms import LaneLoss

Pairs: TypeAlias = dict[str, list[tuple[float, float]]]
"""By name the sum and the weight of each micro-batch."""

_LOSS = "loss"
"""The name of the loss; of one with several terms each has a number behind it."""


def note_losses(terms: Sequence[LaneLoss], losses: Pairs) -> None:
    """Note the terms of a micro-batch's loss, and what they report."""
    for number, term in enumerate(terms):
        name = _LOSS if len(terms) == 1 else f"{_LOSS} {number}"
        losses.setdefault(name, []).append((0.0 if term.sum is None else term.sum.item(), term.weight))
        for metric, pair in read_terms(term.metrics).items():
            losses.setdefault(metric, []).append(pair)


def as_tensors(losses: Pairs) -> dict[str, torch.Tensor]:
    """Return the sums and weights as float64, [num_micro_batches, 2], which are sent faster than lists."""
    return {name: torch.tensor(pairs, dtype=torch.float64) for name, pairs in losses.items()}


def merge_losses(lanes: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the mean loss over all lanes as `loss`, added up over its terms, and of what they report."""
    means = means_of_lanes(lanes)
    terms = [mean for name, mean in means.items() if name.partition(" ")[0] == _LOSS]
    others = {name: mean for name, mean in means.items() if name.partition(" ")[0] != _LOSS}
    return {_LOSS: math.fsum(terms) if terms else math.nan, **others}
