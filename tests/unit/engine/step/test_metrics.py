"""Which steps end an interval, and what its steps add up to."""

import json
import math

import pytest

from lanewise.engine.step.metrics import LogInterval
from lanewise.engine.step.totals import StepTotals
from lanewise.engine.step.wire import LaneRow, Term
from lanewise.runs.callback import LargestLoss


def step_of(*lanes: tuple[float, float]) -> StepTotals:
    """The totals of a step, by the loss sum and the weight of each lane."""
    return StepTotals([LaneRow(number, (Term(*lane),)) for number, lane in enumerate(lanes)])


RAGGED = [step_of((0.1, 3.0), (0.7, 2.5)), step_of((1.3, 1.0)), step_of((0.2, 0.1), (0.0, 0.0), (0.3, 7.0))]


for number, step in enumerate(RAGGED):
    step.metrics = {"always": (0.1 * number, 1.0), "seldom": (0.3, 1.0) if number == 1 else (0.0, 0.0)}


def lane_values(name: str) -> list[float]:
    return [getattr(lane, name) for step in RAGGED for lane in step.lanes]


@pytest.mark.parametrize(
    ("every_steps", "last_step", "logged"),
    [
        (1, 4, [1, 2, 3, 4]),
        (2, 5, [1, 2, 4, 5]),
        (3, 9, [1, 3, 6, 9]),
        (10, 21, [1, 10, 20, 21]),
        (10, 20, [1, 10, 20]),
        (100, 1, [1]),
    ],
)
def test_the_first_step_multiples_and_the_last_step_are_logged(every_steps, last_step, logged):
    interval = LogInterval(every_steps, last_step)
    assert [step + 1 for step in range(last_step) if interval.is_due(step)] == logged


def test_the_loss_is_the_sum_of_all_losses_by_the_sum_of_all_weights():
    interval = LogInterval(10, 100)
    for step in RAGGED:
        interval.add(0, step)
    totals = interval.take()
    weight = math.fsum(lane_values("weight"))
    assert totals.num_steps == 3
    assert totals.loss == pytest.approx(math.fsum(lane_values("loss_sum")) / weight, rel=1e-15)
    assert totals.mean_weight == pytest.approx(weight / 3, rel=1e-15)


def test_a_step_of_weight_0_counts_in_no_line_whatever_its_lanes_have_as_sums():
    interval = LogInterval(10, 100)
    interval.add(0, step_of((3.0, 2.0), (5.0, 0.0)))
    interval.add(1, step_of((7.0, 0.0), (1.0, 0.0)))
    totals = interval.take()
    assert (totals.loss, totals.mean_weight) == (4.0, 1.0)
    assert totals.largest == LargestLoss(1.5, 0, None, [])


def test_an_interval_of_one_step_has_its_loss_and_weight():
    interval = LogInterval(1, 100)
    for step in RAGGED:
        interval.add(0, step)
        totals = interval.take()
        assert (totals.num_steps, totals.loss, totals.mean_weight) == (1, step.loss, step.weight)


def test_a_metric_is_the_sum_of_its_sums_by_that_of_its_weights():
    interval = LogInterval(10, 100)
    for step in RAGGED:
        interval.add(0, step)
    assert interval.take().metrics == {"always": (0.1 + 0.2) / 3, "seldom": 0.3}
    assert list(interval.metric_names) == ["always", "seldom"]
    interval.add(0, step_of((3.0, 2.0)))
    assert all(map(math.isnan, interval.take().metrics.values()))


def test_a_checkpoint_of_the_version_before_has_no_metrics():
    interval = LogInterval(10, 100)
    interval.load_state_dict({"num_steps": 1, "loss_sum": 2.0, "weight": 1.0})
    interval.add(0, RAGGED[1])
    assert interval.take().metrics == {"always": 0.1, "seldom": 0.3}


def test_what_weighs_nothing_has_no_loss():
    interval = LogInterval(10, 100)
    interval.add(0, step_of((0.0, 0.0)))
    assert math.isnan(interval.take().loss)
    interval.add(0, step_of((0.0, 0.0)))
    interval.add(0, step_of((3.0, 2.0)))
    totals = interval.take()
    assert (totals.loss, totals.mean_weight) == (1.5, 1.0)


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_a_run_that_goes_on_adds_up_to_the_same(num_before):
    whole, first, second = (LogInterval(10, 100, samples_of=numbered) for _ in range(3))
    for number, step in enumerate(RAGGED):
        whole.add(number, step)
    for number, step in enumerate(RAGGED[:num_before]):
        first.add(number, step)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for number, step in enumerate(RAGGED[num_before:], start=num_before):
        second.add(number, step)
    totals = whole.take()
    assert totals.largest == LargestLoss(0.2 / 0.1, 2, 0, [2, 0])
    assert second.take() == totals


def numbered(step, lane):
    return step, lane


def test_the_largest_loss_is_by_weight_and_the_first_of_equal_ones():
    interval = LogInterval(10, 100, samples_of=numbered)
    interval.add(4, step_of((9.0, 9.0), (6.0, 2.0), (0.0, 0.0)))
    interval.add(5, step_of((3.0, 1.0), (math.inf, 1.0), (-1.0, 1.0)))
    assert interval.take().largest == LargestLoss(3.0, 4, 1, [4, 1])
    interval.add(6, step_of((-2.0, 1.0)))
    assert interval.take().largest == LargestLoss(-2.0, 6, 0, [6, 0])
    interval.add(7, step_of((0.0, 0.0)))
    assert interval.take().largest is None


def test_samples_are_asked_for_at_the_end_but_of_a_stream_in_their_own_step():
    asked = []
    interval = LogInterval(10, 100, samples_of=lambda *place: asked.append(place) or place)
    interval.add(0, step_of((1.0, 1.0)))
    interval.add(1, step_of((2.0, 1.0)))
    assert asked == []
    interval.take()
    assert asked == [(1, 0)]
    for number, loss in enumerate((1.0, 2.0, 1.5)):
        totals = step_of((loss, 1.0))
        totals.to_source = [2]
        interval.add(number, totals)
    assert asked[1:] == [(0, 0), (1, 0)]
    assert interval.take().largest == LargestLoss(2.0, 1, 0, [1, 0])


def test_a_loss_of_all_lanes_names_no_lane():
    interval = LogInterval(10, 100)
    interval.add(3, step_of((4.0, 2.0)))
    assert interval.take().largest == LargestLoss(2.0, 3, None, [])


@pytest.mark.parametrize(
    "change",
    [
        {"num_steps": -1},
        {"num_steps": 1.0},
        {"num_steps": True},
        {"loss_sum": "1"},
        {"loss_sum": 1},
        {"weight": -1.0},
        {"weight": math.nan},
        {"weight": None},
        {"more": 0.0},
        {"metrics": None},
        {"metrics": {"a": 1.0}},
        {"metrics": {"a": [1.0]}},
        {"metrics": {"a": [1.0, 1]}},
        {"metrics": {"a": [1.0, -1.0]}},
        {"largest": [1.0, 2]},
        {"largest": [1, 2, 3, []]},
        {"largest": "more"},
    ],
)
def test_what_is_no_state_is_refused(change):
    interval = LogInterval(10, 100)
    with pytest.raises(ValueError, match="not a state of the steps since the last line of metrics"):
        interval.load_state_dict({**interval.state_dict(), **change})
    assert interval.state_dict() == LogInterval(10, 100).state_dict()
