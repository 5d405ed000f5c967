"""Sequences of different lengths as one tensor, filled up at their ends."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lanewise.data.ragged import Ragged
from lanewise.errors import DataError


class Padded(NamedTuple):
    """Sequences as rows of one tensor, each followed by a value that fills it up."""

    values: torch.Tensor
    """[number of sequences, length of the longest]."""
    lengths: torch.Tensor
    """int64 [number of sequences]: how many values of each row are the sequence's own."""

    @property
    def mask(self) -> torch.Tensor:
        """Where the sequences' own values are: bool [number of sequences, length of the longest]."""
        return torch.arange(self.values.shape[1], device=self.lengths.device) < self.lengths[:, None]


def pad(sequences: Ragged | Sequence[torch.Tensor], value: float = 0) -> Padded:
    """Make rows of equal length of sequences, for a task's `collate`.

    The loss of a step counts each real token once, wherever it lies, if a micro-batch weighs as much as it
    has of them. Count them in `collate`: a tensor on an accelerator would be waited for.

        def collate(self, samples):
            tokens = pad([sample["tokens"] for sample in samples], IGNORED)
            return {"tokens": tokens, "num_tokens": int(tokens.lengths.sum())}

        def forward(self, model, batch):
            tokens = batch["tokens"].values
            logits = model(tokens.clamp(min=0))  # [sequences, longest, vocabulary]
            sum = cross_entropy(logits.mT, tokens, reduction="sum", ignore_index=IGNORED)
            return Loss(sum=sum, weight=batch["num_tokens"])

    Args:
        sequences: ragged, or 1-d tensors of one dtype, of any length. No tensor at all gives int64 [0, 0].
        value: fills the rows up.

    Raises:
        DataError: if the sequences are no 1-d tensors of one dtype.
    """
    values, offsets = joined(sequences)
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    padded = Padded(values.new_full((len(lengths), longest), value), lengths)
    padded.values.masked_scatter_(padded.mask, values)  # twice as fast as to assign by the mask
    return padded


def joined(sequences: Ragged | Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences one after another, as values [total] and offsets, int64 [number of sequences + 1].

    Raises:
        DataError: if they are no 1-d tensors of one dtype.
    """
    if isinstance(sequences, Ragged):
        if isinstance(sequences.values, Ragged) or sequences.values.ndim != 1:
            raise DataError(
                "The sequences hold sequences again, not values. Join or pad the inner ones first."
            )
        return sequences.values, sequences.offsets
    for number, sequence in enumerate(sequences):
        if sequence.ndim != 1 or sequence.dtype != sequences[0].dtype:
            raise DataError(
                f"Sequence {number} is {sequence.dtype} {list(sequence.shape)}, and sequence 0 is "
                f"{sequences[0].dtype} {list(sequences[0].shape)}. Give 1-d tensors of one dtype."
            )
    offsets = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    return torch.cat(list(sequences)) if len(sequences) else torch.empty(0, dtype=torch.int64), offsets
