"""Next-item recommendation: a causal transformer over the items of a session."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sessions import generated_sessions, load_sessions, read_items
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics import Metric

from lanewise import Loss, Task
from lanewise.data import ParquetDataset, pad
from lanewise.metrics import RankingMetrics
from lanewise.nn import LinearCrossEntropy

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
PADDING = 0


@dataclass(frozen=True)
class ModelConfig:
    """Size of the model."""

    num_layers: int = 2
    num_heads: int = 4
    width: int = 64
    context: int = 20
    """Items that the model looks back; of a longer session, the last ones."""
    dropout: float = 0.2


class Outputs(NamedTuple):
    """What the model makes of a micro-batch."""

    loss: Loss
    scores: torch.Tensor | None
    """[sessions, items]: of the last item of each session; in evaluation only."""


class NextItem(nn.Module):
    """A transformer whose output weights are those of the items that go in."""

    def __init__(self, config: ModelConfig, num_items: int) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items + 1, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            config.width,
            config.num_heads,
            4 * config.width,
            config.dropout,
            activation=F.gelu,
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(config.width)
        self.blocks = nn.TransformerEncoder(layer, config.num_layers, norm, enable_nested_tensor=False)
        self.head = LinearCrossEntropy(config.width, num_items + 1, ignore_index=PADDING)
        for embedding in (self.items, self.positions):
            nn.init.normal_(embedding.weight, std=config.width**-0.5)
        nn.init.zeros_(self.head.bias)
        self.head.weight = self.items.weight

    def forward(self, items: torch.Tensor, lengths: torch.Tensor) -> Outputs:  # [sessions, time], [sessions]
        hidden = self.read(items[:, :-1])
        loss = self.head(hidden.flatten(0, 1), items[:, 1:].flatten())
        return Outputs(loss, self.scores(hidden, lengths))

    def read(self, inputs: torch.Tensor) -> torch.Tensor:  # [sessions, time] -> [sessions, time, width]
        """Return what the model knows after each item."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.dropout(self.items(inputs) + self.positions(positions))
        # Padding stands behind the items of a session, so none of them attends to it.
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        after: torch.Tensor = self.blocks(hidden, mask=mask, is_causal=True)
        return after

    def scores(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Return how each item is scored as the last one of each session; in evaluation only."""
        if self.training:
            return None
        sessions = torch.arange(len(hidden), device=hidden.device)
        return self.head.logits(hidden[sessions, lengths - 2])


class InBatchOutputs(NamedTuple):
    """What the model makes of a micro-batch where the loss is one of all lanes."""

    hidden: torch.Tensor
    """[sessions, context, width]."""
    scores: torch.Tensor | None


class InBatchNextItem(NextItem):
    """The same model, which leaves its loss to the task."""

    def forward(self, items: torch.Tensor, lengths: torch.Tensor) -> Any:
        hidden = self.read(items[:, :-1])
        return InBatchOutputs(hidden, self.scores(hidden, lengths))


class SessionRec(Task):
    """Predicts each next item of a session; the metrics judge the last one of each held-out session.

    Args:
        folder: what `prepare.py` made; without it, generated sessions.
        model: size of the model.
        may_repeat: whether the next item may be one that the session has already. If not, those are not
            ranked, for the model as for the baselines.
    """

    def __init__(
        self, folder: Path | None = None, model: ModelConfig | None = None, *, may_repeat: bool = False
    ) -> None:
        if folder is None:
            logger.warning("No folder is given, so the sessions are generated: they are no one's clicks.")
        self.folder = folder or generated_sessions()
        self.config = model or ModelConfig()
        self.may_repeat = may_repeat
        self.num_items = len(read_items(self.folder))

    def build_model(self) -> nn.Module:
        return NextItem(self.config, self.num_items)

    def train_dataset(self) -> ParquetDataset:
        return load_sessions(self.folder, "train")

    def eval_datasets(self) -> Mapping[str, ParquetDataset]:
        return {"held_out": load_sessions(self.folder, "held_out")}

    def sample_lengths(self, dataset: Dataset[Any]) -> Sequence[int]:
        lengths = load_sessions(self.folder, "train", "length")
        column: Sequence[int] = lengths.__getitems__(list(range(len(lengths)))).columns["length"].numpy()
        return column

    def collate(self, samples: Any) -> Batch:
        sessions = samples.columns["items"]
        num_items = self.config.context + 1
        latest = [items[-num_items:] for items in sessions.values.split(sessions.lengths.tolist())]
        items = pad(latest, PADDING)
        return {
            "items": items.values.long(),
            "lengths": items.lengths,
            "num_targets": float((items.lengths - 1).sum()),  # on the CPU: nobody waits for it
        }

    def forward(self, model: nn.Module, batch: Batch) -> Outputs:
        outputs: Outputs = model(batch["items"], batch["lengths"])
        return outputs

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        return Loss(outputs.loss.sum, weight=batch["num_targets"])

    def build_metrics(self) -> dict[str, Metric]:
        return {"last_item": RankingMetrics(top_k=10)}

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: Any, batch: Batch) -> None:
        seen, last = split_last(batch)
        assert outputs.scores is not None, "metrics are updated in evaluation"
        metrics["last_item"].update(ranked(outputs.scores, seen, may_repeat=self.may_repeat), last)


class InBatchSessionRec(SessionRec):
    """The same, but training tells each next item from the other next items of the step, not from all items.

    Each item of the step is a candidate once, however often it comes, so none is its own negative. Items come
    as negatives as often as in the sessions: those that are never a target in a step cost nothing.
    """

    loss: Any = Task.loss  # none: `row_loss` is in its place

    def build_model(self) -> nn.Module:
        return InBatchNextItem(self.config, self.num_items)

    def collate(self, samples: Any) -> Batch:
        batch = super().collate(samples)
        # All lanes' outputs make one batch, so all sessions are as long as the longest one may be.
        missing = self.config.context + 1 - batch["items"].shape[1]
        return batch | {"items": F.pad(batch["items"], (0, missing), value=PADDING)}

    def batch_loss_inputs(self, batch: Batch) -> torch.Tensor:
        targets: torch.Tensor = batch["items"][:, 1:]
        return targets

    def row_loss(self, model: nn.Module, outputs: InBatchOutputs, inputs: torch.Tensor, rows: slice) -> Loss:
        head = model.get_submodule("head")
        assert isinstance(head, LinearCrossEntropy)
        candidates, place = inputs.unique(return_inverse=True)
        is_target = inputs[rows] != PADDING
        logits = F.linear(outputs.hidden[rows][is_target], head.weight[candidates], head.bias[candidates])
        logits = logits.masked_fill(candidates == PADDING, float("-inf"))
        loss = F.cross_entropy(logits, place[rows][is_target], reduction="sum")
        return Loss(loss, weight=float(is_target.sum()))


def split_last(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the items before the last one of each session, with padding, and the last ones."""
    items, place = batch["items"], batch["lengths"][:, None] - 1
    return items.scatter(1, place, PADDING), items.gather(1, place).squeeze(1)


def ranked(scores: torch.Tensor, seen: torch.Tensor, *, may_repeat: bool) -> torch.Tensor:
    """Give -inf to what cannot come next: padding, and the items that the session has, if none repeats.

    Args:
        scores: [sessions, items].
        seen: [sessions, time], with padding.
        may_repeat: whether an item may come again.
    """
    out = torch.full_like(seen[:, :1], PADDING) if may_repeat else F.pad(seen, (0, 1), value=PADDING)
    return scores.scatter(1, out, float("-inf"))
