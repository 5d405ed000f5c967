"""Judges whether a step can be trained on, and says what is wrong with one that cannot."""

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import final

from lanewise.engine.step.joining import Joining
from lanewise.engine.step.target_mean import RETURN_SUM
from lanewise.engine.step.totals import StepTotals
from lanewise.engine.step.wire import LaneRow, Spread
from lanewise.errors import MOST_SHOWN, DataError, NonFiniteLossError, TaskError, WorldError, shorten
from lanewise.lanes import LaneTurn

logger = logging.getLogger(__name__)


@final
@dataclass
class LaneEvidence:
    """What this process alone knows of its lanes in a step."""

    samples: dict[int, Sequence[int]] = field(default_factory=dict)
    """The samples of each lane."""
    are_missing: dict[int, bool] = field(default_factory=dict)
    """Whether the dataset gave all of them as None."""
    without_targets: list[int] = field(default_factory=list)
    """Lanes whose loss is a mean over no target, as far as is known."""


@final
@dataclass
class Judgement:
    """Refuses what a step cannot be trained on, on every process alike."""

    spread: Spread
    """In `exact` a loss of all samples must be equal on all processes."""
    joining: Joining
    """Knows what lanes gave that does not fit."""
    common_loss: str = "the loss"
    """What a loss of all samples is called."""
    find_not_finite: Callable[[], list[int]] = list
    """Returns the lanes here whose outputs are not finite, where the loss is of all samples."""

    def describe_common(self, name: str, find_not_finite: Callable[[], list[int]]) -> None:
        """Say whose loss is of all samples, and which lanes have outputs that are not finite."""
        self.common_loss, self.find_not_finite = name, find_not_finite

    def require_lanes(self, lanes: Sequence[LaneRow], turn: LaneTurn) -> None:
        """Raise WorldError if rows that arrived are not of the lanes of the step."""
        arrived = list(map(itemgetter(0), lanes))
        if arrived != list(turn.present):
            raise WorldError(
                f"the processes reported the lanes {shorten(arrived)}, and the step has "
                f"{shorten(turn.present)}: what some process sent arrived as something else, so the step was "
                "not taken. Look for a fault of the network, the driver or a device, and continue with "
                "--resume."
            )

    def require_common(self, losses: Sequence[float]) -> None:
        """Raise TaskError if processes computed different losses of all samples; NaN where one could not."""
        known = [loss for loss in losses if not math.isnan(loss)]
        tolerance = 0.0 if self.spread.equality == "exact" else 1e-3
        if known and not math.isclose(min(known), max(known), rel_tol=tolerance):
            raise TaskError(
                f"{self.common_loss} differs between processes, which all get the samples of all lanes: "
                f"{known}. It must depend on nothing else: not on the rank, nor on random numbers of a "
                "generator of its own, nor on what it kept of steps in which a process had no samples."
            )

    def explain_no_update(self, totals: StepTotals, turn: LaneTurn, evidence: LaneEvidence) -> None:
        """Warn of a step without weight, or raise for a loss that is not finite. Collective.

        Raises:
            DataError: if the dataset gave all samples of a step of all lanes as None.
            NonFiniteLossError: if a lane's loss is not finite.
            TaskError: if a lane gave something to gather or to add up, and none did in the first step.
        """
        world, num_lanes = self.spread.world, self.spread.placement.num_lanes
        if not totals.weight:
            is_full = len(turn.present) == num_lanes  # unlike the last step of an epoch
            if is_full and all(world.all_gather_tree(all(evidence.are_missing.values()))):
                some = next(iter(evidence.samples.values()), ())
                raise DataError(
                    f"the dataset gave None for all samples of step {turn.step + 1}, such as samples "
                    f"{shorten(some)}. Does its __getitem__ lack a return?"
                )
            logger.warning("step %d: the global batch has weight 0, so nothing was updated", turn.step + 1)
        if math.isfinite(totals.loss_sum):
            return
        own = evidence.samples, self.find_not_finite(), self.joining.mismatches, evidence.without_targets
        samples_of, not_finite, mismatches, without_targets = zip(*world.all_gather_tree(own), strict=True)
        self.joining.refuse_mismatches(mismatches, turn.step)
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
        if lanes := list(chain.from_iterable(without_targets)):
            remedy = f"In the lanes {shorten(lanes)} it is a mean over no targets. {RETURN_SUM}"
        raise NonFiniteLossError(
            f"the loss is not finite in step {turn.step + 1} (epoch {turn.epoch + 1}), so the weights were "
            f"not updated.\n{listed}\n{remedy}"
        )
