"""What a loss reports besides itself: sums and weights by name, whose means are logged."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import torch

from lanewise.engine.step.message import LaneRow, StepTotals, Term, sum_or_nan
from lanewise.errors import TaskError
from lanewise.processes.world.world import World
from lanewise.runs.callback import TAKEN_NAMES

_ABSENT = Term(0.0, 0.0)
_EXPECTED = 'Give metrics={"name": (sum, weight)}, with two numbers or scalar tensors for each name.'


def metric_terms(metrics: object, what: str) -> dict[str, Term]:
    """Check the metrics of a `Loss`, and return each as a term without a gradient. Waits for no device.

    Args:
        metrics: what the user's code gave.
        what: the name of the loss in an error message.

    Raises:
        TaskError: if they are no mapping of names to pairs of scalars, or a name is taken.
    """
    if not isinstance(metrics, Mapping):
        raise TaskError(f"{what} has metrics that are no mapping: got {metrics!r:.60}. {_EXPECTED}")
    terms: dict[str, Term] = {}
    for name, pair in metrics.items():
        if not isinstance(name, str) or not name:
            raise TaskError(f"{what} has a metric whose name is no text, or empty: got {name!r:.60}.")
        if name in TAKEN_NAMES:
            raise TaskError(
                f"{what} has a metric with the name {name}, which is taken: the trainer reports "
                f"{', '.join(sorted(TAKEN_NAMES))} itself. Use another name, for example my_{name}."
            )
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_scalar, pair)):
            raise TaskError(
                f"{what} has a metric {name} that is no pair of scalars: got {_described(pair)}. {_EXPECTED}"
            )
        value, weight = (
            one.detach().reshape(()) if isinstance(one, torch.Tensor) else float(one) for one in pair
        )
        terms[name] = Term(value, weight)
    return terms


def known_terms(terms: Mapping[str, Term], names: Sequence[str] | None) -> dict[str, Term]:
    """Return the metrics of a lane as numbers; those on an accelerator as copies, without waiting for them.

    Args:
        terms: what `metric_terms` returned.
        names: on which the processes agreed; None in the first step.

    Raises:
        TaskError: if a name is not among them, or a weight is negative or not finite.
    """
    if names is not None and (late := sorted(terms.keys() - set(names))):
        raise TaskError(
            f"the loss reports the metric {late[0]}, which no lane reported in the first step of this run. "
            "The names are fixed by the first step. Report it there too, with (0, 0) where it has no value."
        )
    known: dict[str, Term] = {}
    for name, term in terms.items():
        value, weight = _known(term.value), _known(term.weight)
        if not isinstance(weight, torch.Tensor):
            _require_weight(name, weight)
        known[name] = Term(value, weight)
    return known


def read_terms(terms: Mapping[str, Term]) -> dict[str, tuple[float, float]]:
    """Return the sums and weights of the metrics of a micro-batch. Waits for the device.

    Raises:
        TaskError: if a weight is negative or not finite.
    """
    read = {name: (float(term.value), float(term.weight)) for name, term in terms.items()}
    for name, (_, weight) in read.items():
        _require_weight(name, weight)
    return read


def agree_on_names(names: Iterable[str], world: World) -> tuple[str, ...]:
    """Return the names that any process gives, sorted. Collective: every rank must call this."""
    return tuple(sorted(set[str]().union(*world.all_gather_tree(sorted(names)))))


def with_metrics(
    rows: Sequence[LaneRow], metrics: Mapping[int, Mapping[str, Term]], names: Sequence[str]
) -> list[LaneRow]:
    """Return the rows of this process's lanes, each with a term for each name at its end.

    Args:
        rows: with the terms of the loss.
        metrics: what the lanes reported; a lane that did not report a name counts as (0, 0) there.
        names: on which the processes agreed.
    """
    return [
        LaneRow(lane, (*terms, *(metrics.get(lane, {}).get(name, _ABSENT) for name in names)))
        for lane, terms in rows
    ]


def add_up(totals: StepTotals, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the sum and the weight of each metric over all lanes; NaN if a lane's sum is not finite.

    Raises:
        TaskError: on every rank, if a weight that was on an accelerator is negative or not finite.
    """
    sums: dict[str, tuple[float, float]] = {}
    for number, name in enumerate(names, -len(names)):
        terms = [row.terms[number] for row in totals.lanes]
        for row, term in zip(totals.lanes, terms, strict=True):
            _require_weight(name, float(term.weight), f" in lane {row.lane}")
        values = [float(term.value * term.factor) for term in terms]
        sums[name] = sum_or_nan(values), sum_or_nan([float(term.weight) for term in terms])
    return sums


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each metric by its sum and weight; NaN where the weight is 0."""
    return {name: value / weight if weight else math.nan for name, (value, weight) in sums.items()}


def means_of_lanes(lanes: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the mean of each name, sorted; NaN where a sum is not finite, or the weight is 0.

    Args:
        lanes: for each lane by name the sums and weights of its micro-batches, [num_micro_batches, 2].
    """
    pairs: dict[str, list[list[float]]] = {}
    for lane in lanes:
        for name, of_lane in lane.items():
            pairs.setdefault(name, []).extend(of_lane.tolist())
    return means(
        {
            name: (sum_or_nan(value for value, _ in found), sum_or_nan(weight for _, weight in found))
            for name, found in sorted(pairs.items())
        }
    )


def _is_scalar(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _described(pair: object) -> str:
    if isinstance(pair, torch.Tensor):
        return f"a tensor of shape {tuple(pair.shape)}"
    if isinstance(pair, tuple | list):
        return f"({', '.join(map(_described, pair[:4]))})"
    return f"{pair!r:.60}"


def _known(value: torch.Tensor | float) -> torch.Tensor | float:
    if not isinstance(value, torch.Tensor):
        return value
    return float(value) if value.is_cpu else value.clone()  # the next lane may change it


def _require_weight(name: str, weight: float, place: str = "") -> None:
    if not 0 <= weight < math.inf:
        raise TaskError(
            f"the metric {name} of the loss has the weight {weight}{place}: need a finite number that is not "
            "negative. The weight counts the units that were added up."
        )
