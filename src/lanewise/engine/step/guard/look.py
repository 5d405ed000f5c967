"""What is looked at in the first steps only, where the user's code may break what lanes rely on."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.lanes import LaneTurn


class Look(Protocol):
    """Something to look at until enough was seen; each method does nothing where a look has no use for it.

    A pass over the lanes of a step calls `begin`, for each lane `before_forward`, `after_forward` and
    `after_backward`, and at the end `finish`; only `begin` and `finish` may be collective. Replicas of the
    model run their forwards at once, before the `after_forward` of the first of them, and their backwards in
    that of the last one. A new look joins the list in `engine/step/build.py`.
    """

    verify_does_more: ClassVar[bool] = False
    """Whether `lanewise verify` has probes for the same, which name the cause; its steps go without this."""

    def begin(self, turn: LaneTurn) -> None:
        """Begin to run the lanes of a step, which happens twice where its loss needs other lanes first."""
        return

    def before_forward(self, turn: LaneTurn, lane: Any) -> None:
        """Look before the forward of a `LaneWork`; a loop of the user's own has its `LaneBatch` alone."""
        return

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        """Look at what the forward and the loss of a lane did; it has none where it gets no backward."""
        return

    def after_backward(self, turn: LaneTurn) -> None:
        """Look at what the backward of a lane did."""
        return

    def before_rows(self, turn: LaneTurn, compute: Callable[[], object], what: str) -> None:
        """Look before `compute` gives the loss of a lane's samples against those of all lanes."""
        return

    def after_common(self, loss: torch.Tensor, what: str, given: Sequence[torch.Tensor]) -> None:
        """Look at a loss of samples of several lanes, which was computed from given outputs of these."""
        return

    def finish(self, totals: StepTotals) -> bool:
        """End the step; return whether enough was seen."""
        return True
