"""Next-item prediction on Parquet with a list of items, one of categories and one of floats in each row."""

from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy

from lanewise import Loss, Task
from lanewise.data import ParquetDataset, pad
from lanewise.metrics import RankingMetrics

COLUMNS = ["item_id-list", "category-list", "age_days-list"]


class Transformer(nn.Module):
    """Scores each item as the next one, after each item of a session."""

    def __init__(self, num_items: int, num_categories: int, width: int = 32) -> None:
        super().__init__()
        self.item, self.category = nn.Embedding(num_items + 1, width), nn.Embedding(num_categories + 1, width)
        nn.init.normal_(self.item.weight, std=width**-0.5)
        self.age = nn.Linear(1, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, items: Any, categories: Any, ages: Any) -> Any:  # each [sessions, time]
        inputs = self.item(items) + self.category(categories) + self.age(ages[..., None])
        mask = nn.Transformer.generate_square_subsequent_mask(items.shape[1], device=items.device)
        return self.transformer(inputs, mask=mask, is_causal=True) @ self.item.weight.T


class Sessions(Task):
    """Predicts each next item of a session; the metrics judge the last one."""

    def __init__(self, folder: str, num_items: int, num_categories: int) -> None:
        self.folder, self.sizes = folder, (num_items, num_categories)

    def build_model(self) -> nn.Module:
        return Transformer(*self.sizes)

    def train_dataset(self) -> ParquetDataset:
        return ParquetDataset(f"{self.folder}/*/train.parquet", columns=COLUMNS)

    def eval_datasets(self) -> dict[str, ParquetDataset]:
        return {"valid": ParquetDataset(f"{self.folder}/*/valid.parquet", columns=COLUMNS)}

    def collate(self, samples: Any) -> Any:  # pads with 0, as Transformers4Rec does
        items, categories, ages = (pad(samples.columns[name]) for name in COLUMNS)
        inputs = [padded.values[:, :-1] for padded in (items, categories, ages)]
        return {"inputs": inputs, "targets": items.values[:, 1:], "last": items.lengths - 2}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(*batch["inputs"])

    def loss(self, outputs: Any, batch: Any) -> Loss:
        scores, targets = outputs.flatten(0, 1), batch["targets"].flatten()
        loss = cross_entropy(scores, targets, ignore_index=0, reduction="sum")
        return Loss(loss, weight=(targets != 0).sum())

    def build_metrics(self) -> dict[str, RankingMetrics]:
        return {"next_item": RankingMetrics(top_k=10)}

    def update_metrics(self, metrics: Any, outputs: Any, batch: Any) -> None:
        rows = (batch["last"] >= 0).nonzero().flatten()  # a session of one item has no next one
        last = batch["last"][rows]
        metrics["next_item"].update(outputs[rows, last], batch["targets"][rows, last])
