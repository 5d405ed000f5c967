"""Sequences of different lengths in one tensor."""

from typing import NamedTuple

import torch


class Ragged(NamedTuple):
    """Sequences one after another; sequence i is `values[offsets[i]:offsets[i + 1]]`."""

    values: "torch.Tensor | Ragged"
    """[total number of elements], or ragged again: sequences of sequences."""
    offsets: torch.Tensor
    """int64 [number of sequences + 1], from 0."""

    @property
    def lengths(self) -> torch.Tensor:
        """How many elements each sequence has: int64 [number of sequences]."""
        return self.offsets.diff()
