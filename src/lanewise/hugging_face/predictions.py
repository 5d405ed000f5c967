"""Collects the predictions of all lanes, for the `compute_metrics` of a Trainer."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.nn import functional as F
from torchmetrics import Metric
from transformers import EvalPrediction

from lanewise.errors import TaskError


@final
class EvalPredictions(Metric):
    """Collects predictions and labels in the order of the dataset, for `compute_metrics` of a Trainer."""

    full_state_update = False

    predictions: list[torch.Tensor]
    labels: list[torch.Tensor]
    sizes: list[torch.Tensor]
    """int64 [2] of each micro-batch: how many tensors of predictions and of labels it has."""

    def __init__(self, compute_metrics: Callable[[Any], dict[str, float]]) -> None:
        super().__init__()
        self._compute_metrics = compute_metrics
        for name in ("predictions", "labels", "sizes"):
            self.add_state(name, [], dist_reduce_fx=None)

    def update(self, predictions: Any, labels: tuple[torch.Tensor, ...]) -> None:
        """Note those of a micro-batch.

        Raises:
            TaskError: if the predictions are no tensors of rows.
        """
        several = predictions if isinstance(predictions, list | tuple) else (predictions,)
        if not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in several):
            raise TaskError(
                "compute_metrics gets tensors whose first dimension is the samples, and the model returned "
                "something else too. Choose by preprocess_logits_for_metrics."
            )
        self.predictions += [tensor.cpu() for tensor in several]
        self.labels += [tensor.cpu() for tensor in labels]
        self.sizes.append(torch.tensor([len(several), len(labels)]))

    def compute(self) -> dict[str, float]:
        """Return what `compute_metrics` makes of all rows."""
        num_predictions, num_labels = self.sizes[0].tolist()
        predictions, labels = _joined(self.predictions, num_predictions), _joined(self.labels, num_labels)
        return self._compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels))


def _joined(tensors: Sequence[torch.Tensor], every: int) -> Any:
    """Join what came in turns, as arrays; rows of other lengths are padded with -100, as the Trainer does."""

    def join(parts: Sequence[torch.Tensor]) -> Any:
        width = max(part.shape[1] if part.dim() > 1 else 0 for part in parts)
        padded = [
            F.pad(part, [0, 0] * (part.dim() - 2) + [0, width - part.shape[1]], value=-100) if width else part
            for part in parts
        ]
        joined = torch.cat(padded)
        return (joined.float() if joined.dtype == torch.bfloat16 else joined).numpy()

    arrays = tuple(join(tensors[number::every]) for number in range(every))
    return arrays[0] if every == 1 else arrays
