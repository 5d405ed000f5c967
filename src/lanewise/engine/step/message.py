"""What the processes tell each other in a step: the losses of the lanes, votes, and changes of buffers."""

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, Self, TypeVar, final

import torch

from lanewise.data import LaneBatch
from lanewise.engine.precision import LossScale
from lanewise.engine.step.joining import Joined, Joining
from lanewise.engine.step.parts import NO_PARTS
from lanewise.engine.step.target_mean import RETURN_SUM, target_means
from lanewise.engine.step.terms import LaneLoss, require_weight
from lanewise.engine.step.wire import LaneRow, Spread, Term, Votes, start_exchange
from lanewise.errors import MOST_SHOWN, DataError, NonFiniteLossError, TaskError, WorldError, shorten
from lanewise.lanes import LaneTurn

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ABSENT = Term(0.0, 0.0)
"""A metric that a lane did not report."""


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
    def of(cls, lanes: Sequence[LaneRow], others: Mapping[str, Iterable[Any]]) -> Self:
        """Merge each field of what the processes sent, by rank."""
        declared = cls.__dataclass_fields__
        return cls(lanes, **{name: declared[name].metadata["merge"](sent) for name, sent in others.items()})

    @property
    def loss(self) -> float:
        """Weighted mean of the loss over the global batch; NaN where the weight is 0."""
        return self.loss_sum / self.weight if self.weight else math.nan


@final
class StepMessage:
    """Collects what this process tells in a step, exchanges it, and refuses what it cannot train on.

    In each step call `begin`, `add` for each lane, `send` before the backward of the last one, and `receive`.
    Whoever knows a field of `StepTotals` before puts it into `fields`.

    Args:
        spread: tells who carries the lanes; in `exact` a loss of all samples must be equal on all processes.
        loss_scale: keeps fp16 gradients in range; None where losses are not scaled.
        metric_names: names of metrics that lanes reported before the run was resumed.
        joining: joins what the lanes give for the whole step.
    """

    def __init__(
        self,
        spread: Spread,
        loss_scale: LossScale | None,
        metric_names: Collection[str] = (),
        *,
        joining: Joining,
    ) -> None:
        self._world, self._placement, self._equality = spread.world, spread.placement, spread.equality
        self.loss_scale = loss_scale
        self.scale = 1.0
        """The factor by which all losses of the step, and so all gradients, are multiplied."""
        self._travels = self._world.world_size > 1 or self._world.device.type != "cpu"
        """If not, no tensor is made, whose overhead would show in a small step."""
        self._joining = joining
        self._find_not_finite: Callable[[], list[int]] = list
        self._common_name = ""
        self._known_names = metric_names
        self._metric_names: tuple[str, ...] = ()
        """The names on which the processes agreed last: each step asks, until one has samples."""

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the metrics: the first step of a run that goes on may lack some."""
        names = self._metric_names if self._joining.form is not None else self._known_names
        return {"metric_names": sorted(names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; raise ValueError if `state` is not what `state_dict` returns."""
        names = state["metric_names"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"not names of metrics: {names!r:.100}")
        self._known_names = names

    def begin(self) -> None:
        """Begin a step, and forget the one before."""
        self._rows: list[LaneRow] = []
        self._metrics: dict[int, dict[str, Term]] = {}
        self._samples: dict[int, tuple[int, ...]] = {}
        self.fields: dict[str, Any] = {}
        """What this process sends in the step besides its lanes, by the names of `StepTotals`."""
        self._are_all_missing = True
        self._empty: list[int] = []  # lanes whose loss is a mean over no target, as far as is known
        self.scale = 1.0 if self.loss_scale is None else self.loss_scale.factor

    def describe_common(self, name: str, find_not_finite: Callable[[], list[int]]) -> None:
        """Say whose loss is of all samples, for errors; and which lanes have outputs that are not finite."""
        self._common_name, self._find_not_finite = name, find_not_finite

    def agree_on_unit(self, weight: float, *, is_of_all: bool = False) -> None:
        """Fix the unit of the loss scale. Collective while it has none.

        Args:
            weight: about that of a lane; that of rank 0's first lane counts.
            is_of_all: whether it is that of all lanes instead, or 0 on a process that does not know it.
        """
        if self.loss_scale is not None and not self.loss_scale.has_unit:
            weights = self._world.all_gather_tree(weight)
            unit = max(weights) if is_of_all else self._placement.num_lanes * weights[0]
            self.loss_scale.set_unit(unit)
            self.scale = self.loss_scale.factor

    def add(self, batch: LaneBatch, loss: LaneLoss) -> None:
        """Add the loss of a lane. Collective for the first lane of each process while the scale has no unit.

        Raises:
            TaskError: if a metric has another name than those of the first step, or a weight that cannot be.
        """
        if self.loss_scale is not None:
            self.agree_on_unit(loss.weight or batch.num_samples)
        lane = batch.turn.lane
        if not batch.turn.positions:
            return
        self._samples[lane] = batch.indices
        self._are_all_missing &= len(batch.missing) == len(batch.indices)
        if loss.metrics:
            self._metrics[lane] = self._known_metrics(loss.metrics)
        if self._joining.form is None or self._joining.is_on or (loss.parts or NO_PARTS) is not NO_PARTS:
            self._joining.add(batch, loss.parts)
        value: torch.Tensor | float = 0.0
        if loss.value is not None:
            value = loss.value.item() if loss.value.is_cpu else loss.value.detach()
            if isinstance(value, float) and math.isnan(value):  # an accelerator would be waited for
                self._empty += [lane for _, is_empty in target_means(loss.value) if is_empty][:1]
        if self._joining.mismatches:  # so that no rank updates, and all ask why
            value = math.nan
        self._rows.append(LaneRow(lane, (Term(value, loss.weight, loss.factor),)))

    def _known_metrics(self, metrics: Mapping[str, Term]) -> dict[str, Term]:
        """Return metrics as numbers; those on an accelerator as copies, without waiting for them."""
        if self._joining.form is not None and (late := sorted(metrics.keys() - set(self._metric_names))):
            raise TaskError(
                f"the loss reports the metric {late[0]}, which no lane reported in the first step of this "
                "run. The names are fixed by the first step. Report it there too, with (0, 0) where it has "
                "no value."
            )
        known: dict[str, Term] = {}
        for name, term in metrics.items():
            value, weight = _known(term.value), _known(term.weight)
            if not isinstance(weight, torch.Tensor):
                require_weight(name, weight)
            known[name] = Term(value, weight)
        return known

    def send(self, batch: LaneBatch, **others: Any) -> None:
        """Begin the exchange. Collective: every rank must call this, after it has added all its lanes.

        Until a step has samples, the processes agree before on the names of the metrics that lanes report.

        Args:
            batch: the batch of the last lane.
            others: what else this process sends, by the names of `StepTotals`.
        """
        if self._joining.form is None:
            own = set(self._known_names).union(*self._metrics.values())
            of_ranks = self._world.all_gather_tree((sorted(own), self._joining.offer()))
            self._metric_names = tuple(sorted(set[str]().union(*(names for names, _ in of_ranks))))
            self._joining.agree([offer for _, offer in of_ranks], batch.turn.step)
        if names := self._metric_names:
            self._rows = [
                LaneRow(lane, (*terms, *(self._metrics.get(lane, {}).get(name, _ABSENT) for name in names)))
                for lane, terms in self._rows
            ]
        num_terms = 1 + len(names)
        if self._joining.is_on:
            num_terms += self._joining.num_terms
            self._rows = [LaneRow(lane, (*terms, *self._joining.terms(lane))) for lane, terms in self._rows]
        self._batch = batch
        if batch.to_source is not None:
            self.fields["to_source"] = batch.to_source.numbers
        self.fields |= others
        if self._travels:
            shape = self._placement.most, num_terms
            self._wait = start_exchange(self._rows, self.fields, self._world, *shape)

    def receive(self) -> StepTotals:
        """Wait for the exchange, and return the totals over all lanes.

        Raises:
            TaskError: on every rank, if the processes computed different losses of all samples, a weight
                that was on an accelerator cannot be, or lanes gave different parts.
            WorldError: likewise, if the totals are not of the lanes of the step.
        """
        totals = StepTotals.of(*self._wait()) if self._travels else StepTotals(self._rows, **self.fields)
        if self._world.world_size > 1:
            lanes = list(map(itemgetter(0), totals.lanes))
            if lanes != list(self._batch.turn.present):
                raise WorldError(
                    f"the processes reported the lanes {shorten(lanes)}, and the step has "
                    f"{shorten(self._batch.turn.present)}: what some process sent arrived as something else, "
                    "so the step was not taken. Look for a fault of the network, the driver or a device "
                    "(`lanewise doctor`), and continue with --resume."
                )
            if totals.common_loss:
                self._require_agreement(totals.common_loss)
        if self._batch.to_source is not None:
            self._batch.to_source.receive(totals.to_source)
        if self._metric_names:
            totals.metrics = {
                name: _sum_metric(name, totals.lanes, number)
                for number, name in enumerate(self._metric_names, 1)
            }
        if self._joining.is_on:
            totals.joined = self._joining.join(totals.lanes, self._batch)
        return totals

    def _require_agreement(self, losses: Sequence[float]) -> None:
        known = [loss for loss in losses if not math.isnan(loss)]
        tolerance = 0.0 if self._equality == "exact" else 1e-3
        if known and not math.isclose(min(known), max(known), rel_tol=tolerance):
            raise TaskError(
                f"{self._common_name} differs between processes, which all get the samples of all lanes: "
                f"{known}. It must depend on nothing else: not on the rank, nor on random numbers of a "
                "generator of its own, nor on what it kept of steps in which a process had no samples."
            )

    def explain_no_update(self, totals: StepTotals, turn: LaneTurn) -> None:
        """Warn of a step without weight, or raise for a loss that is not finite. Collective.

        Raises:
            DataError: if the dataset gave all samples of a step of all lanes as None.
            NonFiniteLossError: if a lane's loss is not finite.
            TaskError: if a lane gave something to gather or to add up, and none did in the first step.
        """
        if not totals.weight:
            is_full = len(turn.present) == self._placement.num_lanes  # unlike the last step of an epoch
            if is_full and all(self._world.all_gather_tree(self._are_all_missing)):
                raise DataError(
                    f"the dataset gave None for all samples of step {turn.step + 1}, such as samples "
                    f"{shorten(next(iter(self._samples.values()), ()))}. Does its __getitem__ lack a return?"
                )
            logger.warning("step %d: the global batch has weight 0, so nothing was updated", turn.step + 1)
        if math.isfinite(totals.loss_sum):
            return
        own = self._samples, self._find_not_finite(), self._joining.mismatches, self._empty
        samples_of, not_finite, mismatches, empty = zip(*self._world.all_gather_tree(own), strict=True)
        self._joining.refuse_mismatches(mismatches, turn.step)
        samples: Mapping[int, Sequence[int]] = ChainMap(*samples_of)
        bad = [(lane, "outputs that are not finite") for lanes in not_finite for lane in lanes]
        if not bad:
            sums = {row.lane: row.loss_sum for row in totals.lanes}
            bad = [(lane, f"loss {value}") for lane, value in sums.items() if not math.isfinite(value)]
        described = [
            f"  lane {lane}: {what}, samples {shorten(samples[lane])}" for lane, what in bad[:MOST_SHOWN]
        ]
        if len(bad) > MOST_SHOWN:
            described.append(f"  and {len(bad) - MOST_SHOWN} more of {len(totals.lanes)} lanes")
        listed, remedy = "\n".join(described), "Look at these samples, or lower the learning rate."
        if lanes := list(chain.from_iterable(empty)):
            remedy = f"In the lanes {shorten(lanes)} it is a mean over no targets. {RETURN_SUM}"
        raise NonFiniteLossError(
            f"the loss is not finite in step {turn.step + 1} (epoch {turn.epoch + 1}), so the weights were "
            f"not updated.\n{listed}\n{remedy}"
        )


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


def _sum_metric(name: str, lanes: Sequence[LaneRow], number: int) -> tuple[float, float]:
    """Return the sum and the weight of a metric over all lanes; NaN if a lane's sum is not finite."""
    terms = [row.terms[number] for row in lanes]
    for row, term in zip(lanes, terms, strict=True):
        require_weight(name, float(term.weight), f" in lane {row.lane}")
    values = [float(term.value * term.factor) for term in terms]
    return sum_or_nan(values), sum_or_nan([float(term.weight) for term in terms])


def _known(value: torch.Tensor | float) -> torch.Tensor | float:
    if not isinstance(value, torch.Tensor):
        return value
    return float(value) if value.is_cpu else value.clone()  # the next lane may change it
