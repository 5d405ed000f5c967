"""How a step that was taken again compares with what the run wrote of it, and what an audit has seen."""

import itertools
import math
from dataclasses import replace

import pytest

from lanewise.commands.replay.plan import Written
from lanewise.commands.replay.replay import ReplayedStep
from lanewise.commands.replay.report import ReplayAudit, compare_step, lane_lines

STEP = ReplayedStep(4, 2.5, 8.0, {"train/loss": 2.5, "train/grad_norm": math.nan}, {"model/w": "0a"})


def test_digests_and_the_line_are_compared_by_name():
    """A number that JSON lacks was written as null; times and other groups are left out."""
    line = {"step": 4, "train/loss": 2.5, "train/grad_norm": None, "perf/samples_per_second": 3.0}
    found = compare_step(STEP, Written({4: {"model/w": "0a"}}, {4: line}))
    assert (found.num_compared, found.differing, found.code) == (3, {}, 0)


def test_what_differs_is_named_and_judged_where_equal_bytes_are_promised():
    found = compare_step(STEP, Written({4: {"model/w": "0b", "model/v": "0c"}}))
    assert found.differing == {"model/w": ("0a", "0b"), "model/v": ("none", "0c")}
    assert found.lines()[1] == "  model/w: 0a, and 0b in the run"
    assert found.code == 1
    assert replace(found, is_exact=False).code == 2


def test_of_a_step_of_which_nothing_was_written_nothing_is_said():
    found = compare_step(STEP, Written({3: {"model/w": "0a"}}))
    assert found.code == 2
    assert "wrote nothing of it" in found.lines()[0]


@pytest.mark.parametrize("num_wrong", [1, 2, 3])
def test_the_chance_of_an_audit_is_that_of_counting(num_wrong):
    wrong = list(itertools.combinations(range(9), num_wrong))
    found = sum(min(steps) < 4 for steps in wrong)
    assert ReplayAudit(0, [], 9, 4).chance(num_wrong) == pytest.approx(found / len(wrong))


def test_the_sample_with_the_largest_loss_comes_first_and_nan_before_all():
    found = {"samples": [3, 5, 7], "loss": 1.0, "weight": 3.0, "scale": 1.0, "digests": {}, "norms": {}}
    lines = lane_lines({**found, "alone": [(3, 1.0), (5, math.nan), (7, 4.0)], "why_none": ""})
    assert [line.rpartition(" ")[2] for line in lines[-3:]] == ["5", "7", "3"]
