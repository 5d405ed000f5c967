"""The losses of a step's lanes: scales them for the backward, exchanges them, refuses non-finite ones."""

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch

from lanewise.config import Equality
from lanewise.data import LaneBatch
from lanewise.engine.precision import LossScale
from lanewise.engine.step.loss_metrics import add_up, agree_on_names, known_terms, with_metrics
from lanewise.engine.step.message import LaneRow, StepMessage, StepTotals, Term, Votes
from lanewise.engine.step.terms import LaneLoss, LaneShare
from lanewise.errors import MOST_SHOWN, NonFiniteLossError, TaskError, shorten
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.device.accelerator import start_copy_to_host
from lanewise.processes.world.world import World

logger = logging.getLogger(__name__)


@final
class StepLosses:
    """Collects the losses and weights of this process's lanes, and exchanges them with the other processes.

    In each step call `begin`, `add` for each lane, `start_exchange` and `finish`.

    Args:
        world: the processes.
        placement: which process carries which lanes.
        loss_scale: keeps fp16 gradients in range; None where losses are not scaled.
        metric_names: names of metrics that lanes reported before the run was resumed.
        equality: the grade, in which a loss of all samples must be equal on all processes.
    """

    def __init__(
        self,
        world: World,
        placement: Placement,
        loss_scale: LossScale | None,
        metric_names: Collection[str] = (),
        equality: Equality = "exact",
    ) -> None:
        self._world = world
        self._placement = placement
        self.loss_scale = loss_scale
        self._equality = equality
        self.find_not_finite: Callable[[], list[int]] = list
        """Returns the lanes of this process with outputs that are not finite, where one loss is of all."""
        self.common_loss: torch.Tensor | float | None = None
        """See `StepMessage`; set in a step that has one."""
        self.common_name = ""
        self._known_names = metric_names
        self._metric_names: tuple[str, ...] | None = None
        """On which the processes agreed in the first step; None before."""

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the metrics: the first step of a run that goes on may lack some."""
        names = self._known_names if self._metric_names is None else self._metric_names
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
        self._metrics: dict[int, Mapping[str, Term]] = {}
        self._samples: dict[int, tuple[int, ...]] = {}

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

    def add(
        self, batch: LaneBatch, loss: LaneLoss | LaneShare
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Take the loss of a lane.

        Collective for the first lane of each process while the loss scale has no unit yet.

        Args:
            batch: the batch of the lane.
            loss: what it adds; nothing where its turn has no positions.

        Returns:
            The arguments `loss` and `factor` of `Reducer.backward`: the scalar and its factor.

        Raises:
            TaskError: if a metric has another name than those of the first step, or a weight that cannot be.
        """
        told = loss.told if isinstance(loss, LaneShare) else loss
        if self.loss_scale is not None and not self.loss_scale.has_unit:
            self.agree_on_unit(0.0 if told is None else told.weight)
        if not batch.turn.positions:
            return None, None
        self._samples[batch.turn.lane] = batch.indices
        term = Term(0.0, 0.0 if told is None else told.weight)
        if told is not None and told.metrics:
            self._metrics[batch.turn.lane] = known_terms(told.metrics, self._metric_names)
        if told is not None and told.value is not None:
            known = told.value.item() if told.value.is_cpu else told.value.detach()
            term = Term(known, told.weight, told.factor)
        self._rows.append(LaneRow(batch.turn.lane, (term,)))
        if loss.value is None:
            return None, None
        scale = 1.0 if self.loss_scale is None else self.loss_scale.factor
        return loss.value, loss.backward_factor(batch.turn, scale)

    def fits(self, norm: torch.Tensor | None) -> bool:
        """Tell whether the gradient is in the range of fp16, and adapt the loss scale. Waits for the norm."""
        if self.loss_scale is None:
            return True
        assert norm is not None
        is_finite = math.isfinite(start_copy_to_host(norm)())
        self.loss_scale.update(is_finite=is_finite)
        return is_finite

    @property
    def factor(self) -> float:
        """The factor by which all losses, and so all gradients, are multiplied."""
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    def divisor(self, totals: StepTotals, turn: LaneTurn) -> float:
        """Return the divisor that turns the sums of gradients into means over the global batch.

        In a step of one lane the factor of its backward already includes the division by the weight, which
        saves a division for each gradient.
        """
        return self.factor * (1.0 if len(turn.present) == 1 else totals.weight)

    def start_exchange(
        self,
        turn: LaneTurn,
        votes: Votes,
        buffer_changes: Sequence[float] | torch.Tensor,
        computed_seconds: float | None = None,
        upcoming: Sequence[int] | None = None,
    ) -> None:
        """Begin the exchange. Collective: every rank must call this, after it has added all its lanes.

        In the first step the processes agree before on the names of the metrics that the lanes report.

        Args:
            turn: one of this process in the step.
            votes: whether this process wants to save after the step, to stop there, and to end the run.
            buffer_changes: what `LaneBuffers.changes` returns.
            computed_seconds: how long this process takes to compute a step; None on every rank where none
                tells it.
            upcoming: how many samples the lanes of this process have in the next step of a stream.
        """
        if self._metric_names is None:
            own = {*self._known_names, *(name for lane in self._metrics.values() for name in lane)}
            self._metric_names = agree_on_names(own, self._world)
        rows, num_metrics = self._rows, len(self._metric_names)
        if num_metrics:
            rows = with_metrics(rows, self._metrics, self._metric_names)
        message = StepMessage(
            rows, *votes, buffer_changes, 1 + num_metrics, computed_seconds, self.common_loss, upcoming
        )
        self._wait: Callable[[], StepTotals] = message.start_exchange(
            self._world, self._placement.most, turn.present
        )

    def finish(self) -> StepTotals:
        """Wait for the exchange, and return the totals over all lanes.

        Raises:
            TaskError: on every rank, if the processes computed different losses of all samples.
            WorldError: likewise, if the totals are not of the lanes of the step.
        """
        totals, self.common_loss = self._wait(), None
        if totals.common_losses:
            self._require_agreement(totals.common_losses)
        if self._metric_names:
            totals.metrics = add_up(totals, self._metric_names)
        return totals

    def _require_agreement(self, told: Sequence[float]) -> None:
        known = [one for one in told if not math.isnan(one)]
        tolerance = 0.0 if self._equality == "exact" else 1e-3
        if known and not math.isclose(min(known), max(known), rel_tol=tolerance):
            raise TaskError(
                f"{self.common_name} differs between processes, which all get the samples of all lanes: "
                f"{known}. It must depend on nothing else: not on the rank, nor on random numbers of a "
                "generator of its own, nor on what it kept of steps in which a process had no samples."
            )

    def require_finite(self, totals: StepTotals, turn: LaneTurn) -> None:
        """Raise NonFiniteLossError if a lane's loss is not finite; warn where the step has no weight.

        Collective where a loss is not finite, which all ranks know from the totals.
        """
        if not totals.weight:
            logger.warning("step %d: the global batch has weight 0, so nothing was updated", turn.step + 1)
        if math.isfinite(totals.loss_sum):
            return
        told = self._world.all_gather_tree((self._samples, self.find_not_finite()))
        samples: Mapping[int, Sequence[int]] = ChainMap(*(one for one, _ in told))
        bad = [(lane, "outputs that are not finite") for _, lanes in told for lane in lanes]
        if not bad:
            sums = {row.lane: row.loss_sum for row in totals.lanes}
            bad = [(lane, f"loss {value}") for lane, value in sums.items() if not math.isfinite(value)]
        described = [
            f"  lane {lane}: {what}, samples {shorten(samples[lane])}" for lane, what in bad[:MOST_SHOWN]
        ]
        if len(bad) > MOST_SHOWN:
            described.append(f"  and {len(bad) - MOST_SHOWN} more of {len(totals.lanes)} lanes")
        listed = "\n".join(described)
        raise NonFiniteLossError(
            f"the loss is not finite in step {turn.step + 1} (epoch {turn.epoch + 1}), so the weights were "
            f"not updated.\n{listed}\nLook at these samples, or lower the learning rate."
        )
