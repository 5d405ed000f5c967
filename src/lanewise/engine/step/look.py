"""What is looked at in the first steps only, where the user's code may break what lanes rely on."""

from collections.abc import Sequence
from typing import Protocol

import torch

from lanewise.lanes import LaneTurn


class Look(Protocol):
    """Something to look at until enough was seen; each method does nothing where a look has no use for it.

    In each step the engine calls `begin`, in each round of lanes `before_backward` and `after_backward`, and
    at the end `finish`; only `begin` may be collective. A new look joins the list of `LaneGradients`.
    """

    def begin(self, turn: LaneTurn) -> None:
        """Begin a step, or go on with one whose lanes had a forward without a backward before."""
        return

    def before_backward(self, in_round: Sequence[LaneTurn], losses: Sequence[torch.Tensor | None]) -> None:
        """Look at what the forwards and losses of a round of lanes did; a lane may have no loss."""
        return

    def after_backward(self, in_round: Sequence[LaneTurn]) -> None:
        """Look at what the backward of the round did."""
        return

    def finish(self) -> bool:
        """End the step; return whether enough was seen."""
        return True
