"""What is said of losses that are not finite."""

import math

import pytest
import torch

from lanewise.data import LaneBatch
from lanewise.engine.precision import LossScale
from lanewise.engine.step.losses import StepLosses
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import NonFiniteLossError
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.world.world import LocalWorld

ALONE = LocalWorld(torch.device("cpu"))

NUM_LANES = 40


def test_of_many_samples_and_lanes_the_first_are_named():
    """A model that returned NaN for all of 16 lanes of 256 samples filled the terminal with 4,096 numbers."""
    losses = StepLosses(
        ALONE,
        Placement.of(NUM_LANES, ALONE),
        loss_scale=None,
    )
    losses.begin()
    for lane in range(NUM_LANES):
        indices = tuple(range(1000 * lane, 1000 * lane + 100))
        turn = LaneTurn(1, 7, lane, range(100), present=range(NUM_LANES), is_last=lane == NUM_LANES - 1)
        losses.add(
            LaneBatch(turn, indices, None, 100),
            LaneLoss(torch.tensor(math.nan, requires_grad=True), 100.0, 100.0, is_sample_mean=True),
        )
    losses.start_exchange(turn, (False, False, False), [])
    with pytest.raises(NonFiniteLossError) as caught:
        losses.require_finite(losses.finish(), turn)
    first, *lanes, rest, remedy = str(caught.value).splitlines()
    assert first == "the loss is not finite in step 8 (epoch 2), so the weights were not updated."
    assert len(lanes) == 8
    assert lanes[1] == f"  lane 1: loss nan, samples {list(range(1000, 1008))} and 92 more"
    assert rest == "  and 32 more of 40 lanes"
    assert remedy == "Look at these samples, or lower the learning rate."


@pytest.mark.parametrize(("weight", "is_of_all"), [(2.0, False), (80.0, True)])
def test_the_unit_of_the_loss_scale_is_the_weight_of_a_global_batch(weight, is_of_all):
    """A loss of all lanes told its weight as if it were that of one: the scale was too small."""
    scale = LossScale()
    losses = StepLosses(ALONE, Placement.of(NUM_LANES, ALONE), loss_scale=scale)
    before = scale.state_dict()["scale"]
    losses.agree_on_unit(weight, is_of_all=is_of_all)
    assert scale.factor == before / 128  # the next power of two
