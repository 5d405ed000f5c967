"""What the processes tell each other in a step, and what is said of losses that cannot be trained on."""

import math

import pytest
import torch
from torch import nn

from lanewise import Loss
from lanewise.data import LaneBatch
from lanewise.engine.precision import LossScale
from lanewise.engine.step.joining import Joining
from lanewise.engine.step.judgement import Judgement
from lanewise.engine.step.message import StepMessage
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals, means
from lanewise.engine.step.wire import LaneRow, Spread, Term
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.world.world import LocalWorld
from lanewise.reduce.single import SingleReducer

ALONE = LocalWorld(torch.device("cpu"))
NUM_LANES = 40


def message(num_lanes: int, scale: LossScale | None = None) -> StepMessage:
    return message_of(ALONE, num_lanes, scale)


def message_of(world: LocalWorld, num_lanes: int, scale: LossScale | None = None) -> StepMessage:
    placement = Placement.of(num_lanes, ALONE)
    reducer, spread = SingleReducer(nn.Linear(1, 1), num_lanes, "exact"), Spread(world, placement, "exact")
    joining = Joining(reducer, world, placement, is_on=False)
    return StepMessage(spread, scale, joining=joining, judgement=Judgement(spread, joining))


def sent(losses: dict[int, object], steps: int = 1) -> StepTotals:
    """Return the totals of the last of so many equal steps, in which lanes have these losses."""
    told = message(len(losses))
    for _ in range(steps):
        told.begin()
        for lane, loss in losses.items():
            turn = LaneTurn(0, 0, lane, range(1), present=range(len(losses)), is_last=lane == max(losses))
            batch = LaneBatch(turn, (lane,), None, 1)
            told.add(batch, LaneLoss.of(loss, 1, "the loss"))
        told.send(batch)
        totals = told.receive()
    return totals


def mean(weight: object, metrics: dict[str, tuple[object, object]] | None = None) -> Loss:
    return Loss(torch.tensor(1.0, requires_grad=True), weight, metrics=metrics)


def test_a_lane_whose_loss_weighs_nothing_still_reports():
    nothing = Loss(torch.tensor(1.0), 0, metrics={"a": (1.0, 2.0)})
    totals = sent({0: nothing, 1: mean(1.0)}, steps=2)
    assert (totals.loss, totals.metrics) == (1.0, {"a": (1.0, 2.0)})


def test_a_sum_counts_whatever_its_weight():
    assert sent({0: mean(0.0), 1: mean(2.0)}).loss == 1.0


def test_a_lane_without_a_name_counts_nothing_and_a_sum_that_is_not_finite_is_nan():
    totals = sent(
        {
            0: mean(1.0, {"a": (0.1, 1.0), "b": (math.inf, 1.0)}),
            1: mean(1.0),
            2: mean(1.0, {"a": (0.2, 0.5), "c": (0.0, 0.0)}),
        }
    )
    assert totals.metrics["a"] == (math.fsum([0.1, 0.2]), 1.5)
    assert means(totals.metrics) == pytest.approx({"a": 0.2, "b": math.nan, "c": math.nan}, nan_ok=True)
    assert (totals.loss_sum, totals.weight, totals.is_trainable) == (3.0, 3.0, True)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, torch.tensor(-0.5)])
def test_a_weight_of_a_metric_that_cannot_be_is_refused(weight):
    with pytest.raises(TaskError, match=r"the metric a of the loss has the weight .*: need a finite number"):
        sent({0: mean(1.0, {"a": (1.0, weight)})})


def test_a_weight_that_an_accelerator_told_names_the_lane(monkeypatch):
    told = message(1)
    told.begin()
    turn = LaneTurn(0, 0, 0, range(1), present=range(1), is_last=True)
    loss = LaneLoss.of(mean(1.0, {"a": (1.0, 2.0)}), 1, "the loss")
    batch = LaneBatch(turn, (3,), None, 1)
    told.add(batch, loss)
    told.send(batch)
    rows = [LaneRow(3, (Term(1.0, 1.0), Term(1.0, -2.0)))]
    monkeypatch.setattr(told, "_rows", rows)  # as only the device knew it
    with pytest.raises(TaskError, match=r"the metric a of the loss has the weight -2\.0 in lane 3: need"):
        told.receive()


@pytest.mark.parametrize(("weight", "is_of_all"), [(2.0, False), (80.0, True)])
def test_the_unit_of_the_loss_scale_is_the_weight_of_a_global_batch(weight, is_of_all):
    """A loss of all lanes told its weight as if it were that of one: the scale was too small."""
    scale = LossScale()
    told = message(NUM_LANES, scale)
    before = scale.state_dict()["scale"]
    told.agree_on_unit(weight, is_of_all=is_of_all)
    assert told.scale == scale.factor == before / 128  # the next power of two


def test_the_unit_of_the_loss_scale_is_not_that_of_a_lane_without_units():
    """It was 1, which sums over thousands of pixels overflow."""
    scale = LossScale()
    told = message(NUM_LANES, scale)
    before = scale.state_dict()["scale"]
    told.begin()
    turn = LaneTurn(0, 0, 0, range(2), present=range(NUM_LANES), is_last=False)
    told.add(LaneBatch(turn, (0, 1), None, 2), LaneLoss.of(mean(0.0), 2, "the loss"))
    assert scale.factor == before / 128
