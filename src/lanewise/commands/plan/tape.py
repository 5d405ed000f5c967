"""How much memory one lane has in use in the course of its forward and backward, without its gradients.

The tape is recorded once. Reducers differ in what becomes of a complete gradient and in what they gather for
a block: their formulas go through the tape and add that at its marks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import NamedTuple


class TapeMark(Enum):
    """What begins a stretch of the tape."""

    FORWARD = "the lane begins"
    BLOCK_FORWARD = "a block begins"
    BLOCK_END = "a block has returned"
    BACKWARD = "the loss was computed"
    BLOCK_BACKWARD = "the backward comes to a block"
    GRADIENT = "the gradient of a parameter is complete, and taken away"
    END = "the lane has ended"


class Stretch(NamedTuple):
    """The time between two marks."""

    mark: TapeMark
    number: int
    """Which block (from 1 on) or which parameter is marked; 0 for the other marks."""
    live_bytes: int
    """Bytes in use at the mark."""
    peak_bytes: int
    """The most bytes that are in use until the next mark."""


@dataclass(frozen=True)
class Tape:
    """The memory of a lane: its batch, its activations, and what is computed on the way."""

    stretches: Sequence[Stretch]
    batch_bytes: int
    output_bytes: int
    """Bytes of what the forward returned."""
    loss_bytes: int
    """Bytes that the loss keeps for its backward, besides the outputs."""
    saved_bytes: int
    """Bytes that are kept when the loss was computed, with the batch."""

    def peak(self, added_bytes: Iterable[int] = repeat(0)) -> "LanePeak":
        """Return the moment at which most memory is in use.

        Args:
            added_bytes: for each stretch, what is in use besides.
        """
        return max(map(LanePeak, (stretch.peak_bytes for stretch in self.stretches), added_bytes), key=sum)


class LanePeak(NamedTuple):
    """The moment at which most memory is in use."""

    lane_bytes: int
    added_bytes: int
