"""What all processes know of a step: the losses of its lanes, votes, and changes of buffers, merged."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self, TypeVar, final

from lanewise.engine.step.joining import Joined
from lanewise.engine.step.terms import require_weight
from lanewise.engine.step.wire import LaneRow, Votes

T = TypeVar("T")


def merged_by(rule: Callable[[Iterable[Any]], T], default: T) -> T:
    """Declare a field of the message, with the rule that merges what the processes sent, by rank."""
    declared: T = field(default=default, metadata={"merge": rule})
    return declared


def in_rank_order(of_ranks: Iterable[Sequence[float]]) -> Sequence[float]:
    """Merge the numbers of all processes to one sequence."""
    return list(chain.from_iterable(of_ranks))


@final
@dataclass
class StepTotals:
    """Totals of a step over all lanes; the same on every rank, for any number of processes.

    A new field of the message is declared here and nowhere else, with the rule that merges it. A process
    sends numbers for it, as many as every other: `StepMessage.send` gets them by the field's name.
    """

    lanes: Sequence[LaneRow]
    """The lanes that had a turn, in order."""
    votes: Votes = merged_by(lambda votes: Votes(*map(any, zip(*votes, strict=True))), Votes())  # noqa: RUF009
    """What some rank wants after this step."""
    buffer_changes: Sequence[float] = merged_by(lambda packs: list(map(max, zip(*packs, strict=True))), ())
    """The largest change of any lane for each pack of buffers, which `LaneBuffers.merge` needs."""
    computed_seconds: Sequence[float] = merged_by(in_rank_order, ())
    """How long each process took to compute a step, as far as it knew: the mean of earlier steps. Empty of a
    process alone, and in a step that is not logged."""
    common_loss: Sequence[float] = merged_by(in_rank_order, ())
    """The loss of all samples as each process computed it; NaN where one could not, empty without one."""
    to_source: Sequence[float] = merged_by(in_rank_order, ())
    """See `ToSource`."""
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Sum and weight of each metric of the losses, over all lanes."""
    joined: Joined | None = None
    """What the lanes gave for the whole step; None where they never give anything."""

    def __post_init__(self) -> None:
        sums, weights = [], []
        for _, ((value, weight, factor), *_) in self.lanes:
            sums.append(float(value * factor))
            weights.append(float(weight))
        self.loss_sum = sum_or_nan(sums)
        """NaN where some lane's loss is not finite."""
        self.weight = math.fsum(weights)
        """Weight of the global batch."""
        self.is_trainable = 0 < self.weight < math.inf and not math.isnan(self.loss_sum)
        """Whether the model may be updated: the weight is not 0, and the loss of every lane is finite."""

    @classmethod
    def of(cls, lanes: Sequence[LaneRow], sent: Mapping[str, Iterable[Any]], **known: Any) -> Self:
        """Merge each field of what the processes sent, by rank; others are known."""
        declared = cls.__dataclass_fields__
        merged = {name: declared[name].metadata["merge"](of_ranks) for name, of_ranks in sent.items()}
        return cls(lanes, **merged, **known)

    @property
    def loss(self) -> float:
        """Weighted mean of the loss over the global batch; NaN where the weight is 0."""
        return self.loss_sum / self.weight if self.weight else math.nan


def sum_or_nan(values: Iterable[float]) -> float:
    """Add up without intermediate rounding, so the order does not matter; NaN if a term is not finite."""
    try:
        total = math.fsum(values)
    except (ValueError, OverflowError):  # infinite ones of both signs, or finite ones beyond the range
        return math.nan
    return total if math.isfinite(total) else math.nan


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each metric by its sum and weight; NaN where the weight is 0."""
    return {name: value / weight if weight else math.nan for name, (value, weight) in sums.items()}


def sum_metric(name: str, lanes: Sequence[LaneRow], number: int) -> tuple[float, float]:
    """Return the sum and the weight of a metric over all lanes; NaN if a lane's sum is not finite."""
    terms = [row.terms[number] for row in lanes]
    for row, term in zip(lanes, terms, strict=True):
        require_weight(name, float(term.weight), f" in lane {row.lane}")
    values = [float(term.value * term.factor) for term in terms]
    return sum_or_nan(values), sum_or_nan([float(term.weight) for term in terms])
