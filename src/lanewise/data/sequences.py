"""Sequences of different lengths: ragged, as rows that are padded, or packed one after another."""

from collections.abc import Sequence
from typing import NamedTuple, Union

import torch

from lanewise.errors import DataError


class Ragged(NamedTuple):
    """A column of lists: all of their values one after the other, and where each list begins.

    List `i` is `values[offsets[i]:offsets[i + 1]]`. For attention over packed texts, `offsets` are the
    cumulative sequence lengths, and `torch.nested.nested_tensor_from_jagged(values, offsets)` is a view of
    the lists as a nested tensor. In a batch it moves to a device as any tuple of tensors does.
    """

    values: Union[torch.Tensor, "Ragged"]
    """[num_values], or lists again."""
    offsets: torch.Tensor
    """int64 [num_lists + 1], from 0 to num_values."""

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [num_lists]: how many values each list has."""
        return self.offsets.diff()


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
    """Pad sequences to rows of equal length, for a task's `collate`.

    Each real token counts once in the loss of a step if the weight of a micro-batch is the number of its real
    tokens. Count them in `collate`, since reading a count from an accelerator waits for it.

        def collate(self, samples):
            tokens = pad([sample["tokens"] for sample in samples], IGNORED)
            return {"tokens": tokens, "num_tokens": int(tokens.lengths.sum())}

        def forward(self, model, batch):
            return model(batch["tokens"].values.clamp(min=0))  # [sequences, longest, vocabulary]

        def loss(self, outputs, batch):
            targets = batch["tokens"].values
            sum = cross_entropy(outputs.mT, targets, reduction="sum", ignore_index=IGNORED)
            return Loss(sum=sum, weight=batch["num_tokens"])

    Args:
        sequences: ragged, or 1-d tensors of one dtype, of any length. No tensor at all gives int64 [0, 0].
        value: the value that fills rows up.

    Raises:
        DataError: if the sequences are not 1-d tensors of one dtype.
    """
    values, offsets = _joined(sequences)
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    padded = Padded(values.new_full((len(lengths), longest), value), lengths)
    padded.values.masked_scatter_(padded.mask, values)  # twice as fast as to assign by the mask
    return padded


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

    Each real token counts once in the loss of a step if the weight of a micro-batch is the number of its real
    tokens. Count them in `collate`, since reading a count from an accelerator waits for it.

        def collate(self, samples):
            packed = pack([sample["tokens"] for sample in samples])
            targets = packed.values.roll(-1)
            targets[packed.offsets[1:] - 1] = IGNORED  # the last token of a document has no next one
            num_targets = len(targets) - len(samples)
            return {"packed": packed, "targets": targets, "num_targets": num_targets}

        def forward(self, model, batch):
            packed = batch["packed"]
            return model(packed.values, packed.position_ids, packed.attention_mask())  # [total, vocabulary]

        def loss(self, outputs, batch):
            sum = cross_entropy(outputs, batch["targets"], reduction="sum", ignore_index=IGNORED)
            return Loss(sum=sum, weight=batch["num_targets"])

    Args:
        sequences: ragged, or 1-d tensors of one dtype, of any length. No tensor at all gives int64 [0].

    Raises:
        DataError: if the sequences are not 1-d tensors of one dtype.
    """
    values, offsets = _joined(sequences)
    lengths = offsets.diff()
    positions = torch.arange(len(values)) - offsets[:-1].repeat_interleave(lengths)
    return Packed(values, positions, torch.arange(len(lengths)).repeat_interleave(lengths), offsets)


def _joined(sequences: Ragged | Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences one after another, as values [total] and offsets, int64 [number of sequences + 1].

    Raises:
        DataError: if they are not 1-d tensors of one dtype.
    """
    if isinstance(sequences, Ragged):
        if isinstance(sequences.values, Ragged) or sequences.values.ndim != 1:
            raise DataError(
                "The sequences hold sequences again, not values. Join or pad the inner ones first."
            )
        return sequences.values, sequences.offsets
    for number, sequence in enumerate(sequences):
        if sequence.ndim == 0:
            raise DataError(
                f"Sequence {number} is a single {sequence.dtype} number, and not a list of them. A column "
                "with one number in each row is a plain tensor; expand it to the lists beside it."
            )
        if sequence.ndim != 1 or sequence.dtype != sequences[0].dtype:
            raise DataError(
                f"Sequence {number} is {sequence.dtype} {list(sequence.shape)}, and sequence 0 is "
                f"{sequences[0].dtype} {list(sequences[0].shape)}. Give 1-d tensors of one dtype."
            )
    offsets = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    return torch.cat(list(sequences)) if len(sequences) else torch.empty(0, dtype=torch.int64), offsets
