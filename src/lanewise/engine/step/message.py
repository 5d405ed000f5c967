"""What a process tells the others in a step: the losses of its lanes, votes, and changes of buffers."""

import math
from collections.abc import Collection, Mapping
from typing import Any, final

import torch

from lanewise.data import LaneBatch
from lanewise.engine.precision import LossScale
from lanewise.engine.step.joining import Joining
from lanewise.engine.step.judgement import Judgement, LaneEvidence
from lanewise.engine.step.parts import NO_PARTS
from lanewise.engine.step.target_mean import target_means
from lanewise.engine.step.terms import LaneLoss, require_weight
from lanewise.engine.step.totals import StepTotals, sum_metric
from lanewise.engine.step.wire import LaneRow, Spread, Term, start_exchange
from lanewise.errors import TaskError

_ABSENT = Term(0.0, 0.0)
"""A metric that a lane did not report."""


@final
class StepMessage:
    """Collects what this process tells in a step, and exchanges it.

    In each step call `begin`, `add` for each lane, `send` before the backward of the last one, and `receive`.
    Whoever knows a field of `StepTotals` before puts it into `fields`.

    Args:
        spread: tells who carries the lanes.
        loss_scale: keeps fp16 gradients in range; None where losses are not scaled.
        metric_names: names of metrics that lanes reported before the run was resumed.
        joining: joins what the lanes give for the whole step.
        judgement: refuses what arrives and cannot be.
    """

    def __init__(
        self,
        spread: Spread,
        loss_scale: LossScale | None,
        metric_names: Collection[str] = (),
        *,
        joining: Joining,
        judgement: Judgement,
    ) -> None:
        self._world, self._placement = spread.world, spread.placement
        self.loss_scale = loss_scale
        self.scale = 1.0
        """The factor by which all losses of the step, and so all gradients, are multiplied."""
        self._travels = self._world.world_size > 1 or self._world.device.type != "cpu"
        """If not, no tensor is made, whose overhead would show in a small step."""
        self._joining, self._judgement = joining, judgement
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
        self.evidence = LaneEvidence()
        self.fields: dict[str, Any] = {}
        """What this process sends in the step besides its lanes, by the names of `StepTotals`."""
        self.scale = 1.0 if self.loss_scale is None else self.loss_scale.factor

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
        self.evidence.samples[lane] = batch.indices
        self.evidence.are_missing[lane] = len(batch.missing) == len(batch.indices)
        if loss.metrics:
            self._metrics[lane] = self._known_metrics(loss.metrics)
        if self._joining.form is None or self._joining.is_on or (loss.parts or NO_PARTS) is not NO_PARTS:
            self._joining.add(batch, loss.parts)
        value: torch.Tensor | float = 0.0
        if loss.value is not None:
            value = loss.value.item() if loss.value.is_cpu else loss.value.detach()
            if loss.value.is_cpu and loss.share is None and math.isnan(value):  # others would be waited for
                empty = [lane for _, is_empty in target_means(loss.value) if is_empty]
                self.evidence.without_targets.extend(empty[:1])
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
        lanes, sent, batch = self._rows, None, self._batch
        if self._travels:
            lanes, sent = self._wait()
            if self._world.world_size > 1:
                self._judgement.require_lanes(lanes, batch.turn)
        metrics: Mapping[str, tuple[float, float]] = {}
        if self._metric_names:
            names = enumerate(self._metric_names, 1)
            metrics = {name: sum_metric(name, lanes, number) for number, name in names}
        joined = self._joining.join(lanes, batch) if self._joining.is_on else None
        if sent is None:
            totals = StepTotals(lanes, metrics=metrics, joined=joined, **self.fields)
        else:
            totals = StepTotals.of(lanes, sent, metrics=metrics, joined=joined)
            if self._world.world_size > 1 and totals.common_loss:
                self._judgement.require_common(totals.common_loss)
        if batch.to_source is not None:
            batch.to_source.receive(totals.to_source)
        return totals


def _known(value: torch.Tensor | float) -> torch.Tensor | float:
    if not isinstance(value, torch.Tensor):
        return value
    return float(value) if value.is_cpu else value.clone()  # the next lane may change it
