"""By what the means over targets in a loss are divided."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from lanewise.engine.step.target_mean import target_means

OUTPUTS = torch.arange(12.0).view(4, 3).requires_grad_()
PIXELS = torch.arange(48.0).view(4, 3, 2, 2).requires_grad_()
CLASSES, SOME, NONE = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, -100, 0]), torch.full((4,), -100)
WEIGHTS = torch.tensor([1.0, 5.0, 20.0])
IGNORED, WEIGHTED = "the targets that are not ignored", "its targets, weighted by class"
MEANS: dict[str, tuple[list[tuple[str, bool]], Callable[[], torch.Tensor]]] = {
    "some ignored": ([(IGNORED, False)], lambda: F.cross_entropy(OUTPUTS, SOME)),
    "all ignored": ([(IGNORED, True)], lambda: F.cross_entropy(OUTPUTS, NONE)),
    "pixels": (
        [(IGNORED, False)],
        lambda: F.cross_entropy(PIXELS, torch.arange(16).view(4, 2, 2) % 2, ignore_index=1),
    ),
    "weighted": ([(WEIGHTED, False)], lambda: F.cross_entropy(OUTPUTS, CLASSES, weight=WEIGHTS)),
    "smoothed": (
        [(WEIGHTED, False)],
        lambda: F.cross_entropy(OUTPUTS, CLASSES, weight=WEIGHTS, label_smoothing=0.1),
    ),
    "beside others": (
        [(IGNORED, False)],
        lambda: torch.stack([OUTPUTS.mean(), 2 * F.cross_entropy(OUTPUTS, SOME)]).sum(),
    ),
    "in half": ([(IGNORED, False)], lambda: F.cross_entropy(OUTPUTS.bfloat16(), SOME).float()),
    "all count": ([("", False)], lambda: F.cross_entropy(OUTPUTS, CLASSES)),
    "equal weights": (
        [("", False)],
        lambda: F.cross_entropy(OUTPUTS, CLASSES, weight=torch.full((3,), 0.1)),
    ),
    "a sum": ([], lambda: F.cross_entropy(OUTPUTS, SOME, reduction="sum") / 3),
    "squares": ([], lambda: F.mse_loss(OUTPUTS, torch.ones(4, 3))),
    "without a gradient": ([], lambda: F.cross_entropy(OUTPUTS.detach(), SOME)),
}


@pytest.mark.parametrize("kind", MEANS)
def test_what_a_mean_is_divided_by_is_read_in_the_graph(kind: str):
    found, make = MEANS[kind]
    assert list(target_means(make())) == found
