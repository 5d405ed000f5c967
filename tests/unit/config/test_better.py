"""Tests for lanewise.config.better."""

import pytest
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, Metric
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.text import Perplexity, WordErrorRate

from lanewise.config.better import mode_by_name, mode_of

LESS = "loss val_loss valLoss loss_epoch mse rmse ppl wer word_error_rate errors nll l1_loss bpc brier_score"
MORE = (
    "accuracy acc@5 top5_acc f1_macro rouge1 squad/f1 mAP50 roc_auc miou ndcg_at_10 recall@5 acc/0 r2_score"
)
UNKNOWN = "score x power item layer2 learning_rate seconds value"


@pytest.mark.parametrize(("names", "mode"), [(LESS, "min"), (MORE, "max"), (UNKNOWN, None)])
def test_the_ending_of_a_name_tells_what_is_better(names, mode):
    """Of every name but loss the highest value was once the best, also of mse, val_loss, ppl and wer."""
    assert {name: mode_by_name(f"held_out/{name}") for name in names.split()} == dict.fromkeys(
        names.split(), mode
    )


def test_the_name_of_the_dataset_tells_nothing():
    assert mode_by_name("loss/x") is None


class Wrapped(Metric):
    """Says nothing itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def update(self) -> None: ...

    def compute(self) -> float:
        return 0.0


class Negative(Wrapped):
    higher_is_better = True


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        (MeanSquaredError(), "min"),
        (Perplexity(), "min"),
        (WordErrorRate(), "min"),
        (BinaryAccuracy(), "max"),
        (MeanMetric(), None),
        (Wrapped(MeanSquaredError()), "min"),
        (Negative(MeanSquaredError()), "max"),
    ],
)
def test_a_metric_says_itself_what_is_better(metric, mode):
    assert mode_of(metric) == mode
