"""How a step that was taken again compares with what the run wrote of it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lanewise.commands.replay.report import compare_lane, compare_steps, lane_lines

LARGEST = {"loss": 7.5, "step": 3, "lane": 1, "samples": [4, 2]}
COLUMNS = {"train/loss": 2.5, "train/grad_norm": None, "largest_loss": LARGEST}
WRITTEN = {"digests": {"model/w": "0a"}, "metrics": COLUMNS, "evaluation": {"held_out/loss": 0.5}}
GIVEN = {"samples": {0: (1, 2), 1: (4, 2)}, "inputs": {0: "1a", 1: "5a"}}
STEP = {**GIVEN, "weights": {"w": "0c"}, "totals": {"loss": 2.5, "weight": 8.0}, **WRITTEN}


def planned(written, step=4):
    return SimpleNamespace(step=step, written=written, is_exact=True)


def compare_step(step, written):
    return compare_steps(planned({4: written}), {4: step})[4]


def test_all_that_was_written_of_a_step_is_compared():
    found = compare_step(STEP, WRITTEN)
    assert (found.comparison.num_compared, found.comparison.differing, found.code) == (5, {}, 0)
    assert found.notes() == []


@pytest.mark.parametrize(
    ("part", "changed", "name"),
    [
        ("metrics", {**COLUMNS, "largest_loss": {**LARGEST, "samples": [4, 3]}}, "largest_loss"),
        ("metrics", {**COLUMNS, "train/loss": 2.25}, "train/loss"),
        ("metrics", {name: COLUMNS[name] for name in ("train/grad_norm", "largest_loss")}, "train/loss"),
        ("evaluation", {"held_out/loss": 0.25}, "held_out/loss"),
        ("digests", {"model/w": "0b"}, "model/w"),
        ("digests", {}, "model/w"),
        ("samples", {0: (1, 2), 1: (4, 3)}, "lane 1"),
    ],
    ids=["largest loss", "loss", "removed number", "evaluation", "digest", "removed digest", "samples"],
)
def test_whatever_of_it_is_false_or_gone_is_a_difference(part, changed, name):
    found = compare_step(STEP, {**WRITTEN, part: changed})
    assert [*found.comparison.differing] == [part]
    assert found.comparison.differing[part].names == [name]
    assert found.code == 1
    assert replace(found, is_exact=False).code == 2


def test_a_step_is_compared_with_what_an_audit_wrote_of_its_lanes():
    """Only a lane was; and where no audit was asked for, nothing is missing."""
    found = compare_step(STEP, {**GIVEN, "inputs": {0: "1a", 1: "5b"}})
    assert found.verdict() == [
        "step 4: 1 of 4 digests and numbers differ",
        "  inputs of lane 1: 5a, and 5b in the run",
    ]


def test_what_differs_is_named_with_both_values():
    found = compare_step(STEP, {"digests": {"model/w": "0b", "model/v": "0c"}})
    assert found.verdict()[1:] == [
        "  model/w: 0a, and 0b in the run",
        "  model/v: None, and 0c in the run",
    ]


@pytest.mark.parametrize(
    ("written", "last_line"),
    [
        ({part: WRITTEN[part] for part in ("metrics", "evaluation")}, "digests"),
        ({"digests": {"model/w": "0a"}}, "metrics, evaluation"),
        ({**WRITTEN, "jump line": {}}, "jump line"),
    ],
)
def test_the_last_line_names_what_only_one_of_them_has(written, last_line):
    given = {**COLUMNS, "train/learning_rate": 0.1}
    found = compare_step({**STEP, "metrics": given}, written)
    assert str(found).splitlines()[-1] == f"not compared, as only one has it: {last_line}"


def test_of_a_step_of_which_nothing_was_written_nothing_is_said():
    found = compare_step(STEP, {})
    assert found.code == 2
    assert "wrote nothing of it" in found.verdict()[0]


LANE = {"loss": 7.5, "samples": [4, 2], "inputs": "5a", "changed_sources": []}


@pytest.mark.parametrize(
    ("step", "lane", "found", "code"),
    [(3, 1, {}, 0), (3, 1, {"loss": 7.25}, 1), (3, 1, {"samples": [4, 3]}, 1), (3, 0, {}, 2), (2, 1, {}, 2)],
    ids=["equal", "another loss", "other samples", "another lane", "another step"],
)
def test_a_lane_is_compared_with_the_largest_loss_if_it_had_that(step, lane, found, code):
    """The line after step 4 has the largest loss since the line before it, which was that of step 3."""
    assert compare_lane({**LANE, **found}, planned({4: WRITTEN}, step), lane).code == code


@pytest.mark.parametrize(("inputs", "code"), [("5a", 0), ("5b", 1)])
def test_a_lane_is_compared_with_what_an_audit_wrote_of_it(inputs, code):
    found = compare_lane({**LANE, "inputs": inputs}, planned({4: GIVEN}), 1)
    assert (found.code, found.comparison.num_compared) == (code, 2)


def test_the_sample_with_the_largest_loss_comes_first_and_nan_before_all():
    found = {"samples": [3, 5, 7], "loss": 1.0, "weight": 3.0, "scale": 1.0, "digests": {}, "norms": {}}
    alone = [(3, 1.0), (5, math.nan), (7, 4.0)]
    lines = lane_lines({**found, "missing": [], "alone": alone, "why_not": ""})
    assert [line.rpartition(" ")[2] for line in lines[-3:]] == ["5", "7", "3"]
