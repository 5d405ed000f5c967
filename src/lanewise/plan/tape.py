"""What one lane holds in the course of its forward and backward, without its gradients.

It is measured once. Reducers differ in what becomes of a gradient that is complete, and in what they gather
for a block: their formulas play the tape and add that at its marks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Mark(Enum):
    """What begins a stretch of the tape."""

    FORWARD = "the lane begins"
    BLOCK_FORWARD = "a block begins"
    BLOCK_END = "a block has returned"
    BACKWARD = "the loss is there"
    BLOCK_BACKWARD = "the backward comes to a block"
    GRADIENT = "the gradient of a parameter is complete, and taken away"
    END = "the lane has ended"


class Stretch(NamedTuple):
    """What lies between two marks."""

    mark: Mark
    number: int
    """Of the block (from 1 on) or the parameter that is marked."""
    live_bytes: int
    """Alive at the mark."""
    peak_bytes: int
    """The most that is alive until the next mark."""


@dataclass(frozen=True)
class Tape:
    """What a lane holds: its batch, its activations, and what is computed on the way."""

    stretches: Sequence[Stretch]
    batch_bytes: int
    output_bytes: int
    """Of what the forward returned."""
    loss_bytes: int
    """Of what the loss keeps besides for its backward."""
    saved_bytes: int
    """Of what is kept from the loss on, with the batch."""

    def peak(self, added_bytes: Callable[[Stretch], int] = lambda _: 0) -> "LanePeak":
        """Play the tape, and return where most is alive.

        Args:
            added_bytes: told each stretch; returns what is alive besides.
        """
        peaks = (LanePeak(stretch.peak_bytes, added_bytes(stretch)) for stretch in self.stretches)
        return max(peaks, key=sum)


class LanePeak(NamedTuple):
    """The moment at which most is alive."""

    lane_bytes: int
    added_bytes: int
