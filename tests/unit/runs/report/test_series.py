"""Columns of numbers, and how they are thinned."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.runs.report.lines import JsonLinesReader
from lanewise.runs.report.series import Points, mean_of, read_series, thinned, to_json
from tests.unit.runs.report.left import evaluation, step


def series_of(tmp_path, lines):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_series(JsonLinesReader(file))


def test_each_metric_has_its_points_whichever_lines_it_is_in(tmp_path):
    lines = [step(1, 3.0), evaluation(1, 2.0, 0.5), step(2, None), step(3, 1.0, extra=7), {"no": "step"}]
    series = series_of(tmp_path, lines)
    loss = series["train/loss"]
    assert loss.steps.tolist() == [1, 2, 3]
    assert loss.values.tolist()[::2] == [3.0, 1.0]
    assert math.isnan(loss.values[1])
    assert series["held_out/accuracy"].values.tolist() == [0.5]
    assert series["extra"].steps.tolist() == [3]


def test_a_jump_of_the_loss_and_the_largest_one_are_no_metrics(tmp_path):
    largest = {"loss": 9.0, "step": 2, "lane": 0, "samples": [4]}
    jump = {"event": "jump", "step": 2, "largest_loss": largest}
    file = tmp_path / "metrics.jsonl"
    lines = [step(1, 3.0, largest_loss=largest), step(2, 9.0, largest_loss=largest), jump]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    series = read_series(JsonLinesReader(file), jumps := [])
    assert series.keys() == {"train/loss", "train/learning_rate"}
    assert jumps == [jump]


@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, 10**400, None])
def test_what_is_no_number_is_a_gap(tmp_path, value):
    """After a number that is too large, later ones stood one step too early."""
    lines = [step(1, 1.0), {**step(2, 1.0), "train/loss": value}, step(3, 3.0)]
    loss = series_of(tmp_path, lines)["train/loss"]
    assert loss.steps.tolist() == [1, 2, 3]
    assert loss.values.tolist()[::2] == [1.0, 3.0]
    assert math.isnan(loss.values[1])


NUMBERS = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=400)


@settings(max_examples=200)
@given(NUMBERS, st.sampled_from([4, 10, 50]))
def test_thinned_points_keep_extremes_ends_and_gaps(values, most):
    numbers = np.array(values)
    steps = np.arange(len(values), dtype=np.float64)
    kept = thinned(Points(steps, steps + 0.5, numbers), most)
    assert np.all(np.diff(kept.steps) > 0)
    assert np.array_equal(kept.times, kept.steps + 0.5)
    assert np.array_equal(kept.values, numbers[kept.steps.astype(int)], equal_nan=True)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return
    kept_numbers = kept.values[np.isfinite(kept.values)]
    assert kept_numbers.min() == finite.min()
    assert kept_numbers.max() == finite.max()
    places = np.flatnonzero(np.isfinite(numbers))
    kept_places = kept.steps[np.isfinite(kept.values)].astype(int)
    assert (kept_places[0], kept_places[-1]) == (places[0], places[-1])
    for begin, end in pairwise(kept_places):
        has_gap = bool(np.isnan(numbers[begin:end]).any())
        assert has_gap == bool(np.isnan(kept.values[(kept.steps > begin) & (kept.steps < end)]).any())
    assert len(kept_numbers) <= most + 2


def test_numbers_are_written_as_json_takes_them():
    written = to_json(np.array([1.0, 0.123456789, math.nan, math.inf, -2e20]))
    assert written == [1, 0.123457, None, None, -2e20]
    assert json.dumps(written, allow_nan=False)


def test_a_mean_is_over_the_steps_of_each_line_and_leaves_gaps_out():
    """The first line is of one slow step, and counted as much as one of fifty."""
    steps, values = np.array([1.0, 50.0, 100.0, 150.0]), np.array([20.0, 1.0, math.nan, 1.0])
    points = {"a": Points(steps, steps, values)}
    assert mean_of(points, "a") == pytest.approx((20 + 49 + 50) / 100)
    assert mean_of(points, "b") is None
    assert mean_of({"a": Points(*np.full((3, 2), math.nan))}, "a") is None


def test_an_event_has_no_points(tmp_path):
    digests = {"event": "digests", "epoch": 1, "step": 1, "time": 1.0, "digests": {"model/weight": "00"}}
    assert series_of(tmp_path, [step(1, 3.0), digests]).keys() == series_of(tmp_path, [step(1, 3.0)]).keys()
