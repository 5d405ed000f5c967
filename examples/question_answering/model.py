"""The two readers: a small one that learns from nothing, and any pretrained one of `transformers`."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from windows import Windows

NEVER = -1e4
"""The logit of a token that is no answer's."""


@dataclass(frozen=True)
class ReaderConfig:
    """Size of the small reader."""

    width: int = 96
    """Of the embeddings, and of the GRU that reads the question."""
    hidden: int = 64
    """Width of the convolutions."""
    dilations: tuple[int, ...] = (1, 2, 4, 8)
    """One gated convolution for each, over three tokens that are so far apart."""
    dropout: float = 0.2


class Reader(nn.Module):
    """Reads the question with a GRU, and the passage with attention to it, features and convolutions."""

    def __init__(self, config: ReaderConfig, vocabulary_size: int, num_features: int) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.embedding = nn.Embedding(vocabulary_size, width, padding_idx=0)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.dropout = nn.Dropout(config.dropout)
        self.gru = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.importance = nn.Linear(width, 1)
        self.match = nn.Linear(width, hidden)
        self.enter = nn.Linear(3 * width + num_features, hidden)
        self.question = nn.Linear(width, hidden)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(hidden, 2 * hidden, 3, padding=dilation, dilation=dilation)
            for dilation in config.dilations
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in config.dilations)
        self.head = nn.Sequential(
            nn.Linear(2 * hidden + num_features, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )

    def forward(self, batch: Windows) -> torch.Tensor:
        """Return logits of the first and of the last token of the answer: [windows, tokens, 2]."""
        own = batch.mask[:, :, None]
        embedded = self.dropout(self.embedding(batch.tokens))
        is_question = batch.mask & (batch.types == 0)
        lengths = is_question.sum(1)
        asked = self.dropout(self.read_question(embedded, lengths))  # [windows, longest question, width]
        asked_mask = is_question[:, : asked.shape[1]]
        weights = self.importance(asked).squeeze(2).masked_fill(~asked_mask, NEVER).softmax(1)
        question = self.question((weights[:, :, None] * asked).sum(1, keepdim=True))

        alike = F.relu(self.match(embedded))
        alike = alike @ alike[:, : asked.shape[1]].mT
        attended = alike.masked_fill(~asked_mask[:, None], NEVER).softmax(2) @ asked
        seen = torch.cat([embedded, attended, attended * embedded, batch.features], 2)
        hidden = F.relu(self.enter(seen) + question) * own
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            new: torch.Tensor = F.glu(convolution((norm(hidden) * own).mT), 1).mT
            hidden = (hidden + new) * own
        hidden = self.dropout(hidden)
        logits: torch.Tensor = self.head(torch.cat([hidden, hidden * question, batch.features], 2))
        return logits

    def read_question(self, embedded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the GRU's states at the tokens of the question."""
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return states


class Pretrained(nn.Module):
    """A model of `transformers` for question answering; a head that its files lack is drawn at random.

    Args:
        name: of the model on the hub, or the folder where its files are.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        from transformers import AutoModelForQuestionAnswering  # noqa: PLC0415 - takes seconds

        self.model: nn.Module = AutoModelForQuestionAnswering.from_pretrained(name)
        self.takes_types = getattr(self.model.config, "type_vocab_size", 0) > 1

    def forward(self, batch: Windows) -> torch.Tensor:
        """Return logits of the first and of the last token of the answer: [windows, tokens, 2]."""
        types = {"token_type_ids": batch.types} if self.takes_types else {}
        outputs = self.model(input_ids=batch.tokens, attention_mask=batch.mask.long(), **types)
        return torch.stack([outputs.start_logits, outputs.end_logits], 2)
