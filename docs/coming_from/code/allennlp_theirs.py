"""A dataset reader and a model of AllenNLP."""

from collections.abc import Iterable
from typing import Any

import torch
from allennlp.data import DatasetReader, Instance, Vocabulary
from allennlp.data.fields import ArrayField, LabelField
from allennlp.models import Model
from allennlp.training.metrics import CategoricalAccuracy
from torch.nn import functional as F
from toy import Net, test_data, train_data


@DatasetReader.register("points")
class PointReader(DatasetReader):
    """Reads points; the base class keeps this worker's share of them."""

    def _read(self, file_path: str) -> Iterable[Instance]:
        for point, label in {"train": train_data, "test": test_data}[file_path]:
            fields = {
                "points": ArrayField(point.numpy()),
                "labels": LabelField(int(label), skip_indexing=True),
            }
            yield Instance(fields)


@Model.register("points")
class PointModel(Model):
    """Classifies points."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.net = Net()
        self.accuracy = CategoricalAccuracy()

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.net(points)
        self.accuracy(logits, labels)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}

    def get_metrics(self, reset: bool = False) -> dict[str, float]:
        return {"accuracy": self.accuracy.get_metric(reset)}
