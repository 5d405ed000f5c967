"""Sequences of different lengths as one, without filling anything up."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lanewise.data.padding import joined
from lanewise.data.ragged import Ragged


class Packed(NamedTuple):
    """Sequences one after another, with what keeps them apart."""

    values: torch.Tensor
    """[total number of values]."""
    position_ids: torch.Tensor
    """int64 [total]: the place of each value in its own sequence, from 0."""
    document_ids: torch.Tensor
    """int64 [total]: which sequence each value is of, from 0."""
    offsets: torch.Tensor
    """int64 [number of sequences + 1]: where each begins, from 0. Flash attention takes it, in int32, as
    `cu_seqlens`."""

    @property
    def lengths(self) -> torch.Tensor:
        """How many values each sequence has: int64 [number of sequences]."""
        return self.offsets.diff()

    def attention_mask(self) -> torch.Tensor:
        """Return which values (columns) each value (row) may look at: those up to itself of its own sequence.

        Bool [total, total], as `scaled_dot_product_attention` takes it.
        """
        ids = self.document_ids
        return (ids[:, None] == ids).tril()


def pack(sequences: Ragged | Sequence[torch.Tensor]) -> Packed:
    """Put sequences one after another, for a task's `collate`: nothing is computed for padding.

    The loss of a step counts each real token once, wherever it lies, if a micro-batch weighs as much as it
    has of them. Count them in `collate`: a tensor on an accelerator would be waited for.

        def collate(self, samples):
            packed = pack([sample["tokens"] for sample in samples])
            targets = packed.values.roll(-1)
            targets[packed.offsets[1:] - 1] = IGNORED  # the last token of a document has no next one
            num_targets = len(targets) - len(samples)
            return {"packed": packed, "targets": targets, "num_targets": num_targets}

        def forward(self, model, batch):
            packed = batch["packed"]
            logits = model(packed.values, packed.position_ids, packed.attention_mask())  # [total, vocabulary]
            sum = cross_entropy(logits, batch["targets"], reduction="sum", ignore_index=IGNORED)
            return Loss(sum=sum, weight=batch["num_targets"])

    Args:
        sequences: ragged, or 1-d tensors of one dtype, of any length. No tensor at all gives int64 [0].

    Raises:
        DataError: if the sequences are no 1-d tensors of one dtype.
    """
    values, offsets = joined(sequences)
    lengths = offsets.diff()
    positions = torch.arange(len(values)) - offsets[:-1].repeat_interleave(lengths)
    return Packed(values, positions, torch.arange(len(lengths)).repeat_interleave(lengths), offsets)
