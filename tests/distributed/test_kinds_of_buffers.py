"""Kinds of buffers that are easily pinned or lost: resized, integers of observers, not persistent."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    QConfig,
    default_fused_per_channel_wt_fake_quant,
    disable_observer,
    prepare_qat,
)

from lanewise.config import EvaluateConfig
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure, train
from tests.distributed.test_between_lanes import Points, fit

NUM_LANES = 4
WORLDS = pytest.mark.parametrize("world_size", [2, 3])


class Growing(nn.Module):
    """Resizes a buffer in place, to another size in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        number = len(self.seen)
        self.seen.resize_(number + 1)[number:] = inputs.mean()
        return self.layer(inputs)


class OfGrowing(Points):
    def build_model(self) -> nn.Module:
        return Growing()

    def eval_datasets(self) -> Any:
        return {"held_out": self.train_dataset()}


@WORLDS
def test_a_forward_may_resize_a_buffer_after_the_models_were_compared_and_the_best_one_was_written(
    world_size, tmp_path
):
    """Both looked at the bytes through numpy, which fixes the size of a tensor for ever."""
    config = configure(OfGrowing, num_lanes=NUM_LANES, steps=4)
    evaluate = EvaluateConfig(every_steps=1, best="held_out/loss")
    config = dataclasses.replace(config, evaluate=evaluate)
    alone = run_distributed(fit, 1, config, str(tmp_path / "alone"))[0]
    assert len(alone[0]["seen"]) == 4 * 5
    for result in run_distributed(fit, world_size, config, str(tmp_path / "several")):
        assert result == alone


class Quantised(Points):
    """Quantisation-aware training, with observers that may be calibrated beforehand and switched off."""

    def __init__(self, *, is_calibrated: bool) -> None:
        self.is_calibrated = is_calibrated

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        activation = FusedMovingAvgObsFakeQuantize.with_args(quant_min=0, quant_max=255)
        model.qconfig = QConfig(activation, default_fused_per_channel_wt_fake_quant)  # type: ignore[assignment]
        prepare_qat(model, inplace=True)
        if self.is_calibrated:
            model(self.train_dataset().tensors[0])  # type: ignore[attr-defined]
            model.apply(disable_observer)
        return model


def test_observers_are_calibrated_where_the_model_is_built_and_then_switched_off():
    """Each lane gave the integer zero_point another value, and no user can make it a float buffer."""
    config = configure(Quantised, num_lanes=NUM_LANES, steps=3, is_calibrated=True)
    alone = run_distributed(train, 1, config)[0]
    for result in run_distributed(train, 2, config):
        assert result == alone
    with pytest.raises(RuntimeError, match=r"zero_point differs between the lanes .*disable_observer"):
        run_distributed(train, 1, configure(Quantised, num_lanes=NUM_LANES, steps=3, is_calibrated=False))
