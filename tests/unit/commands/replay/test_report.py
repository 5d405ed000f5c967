"""How a step that was taken again compares with what the run wrote of it, and what an audit has seen."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lanewise.commands.replay.plan import Written
from lanewise.commands.replay.replay import ReplayedStep
from lanewise.commands.replay.report import ReplayAudit, compare_lane, compare_step, lane_lines
from lanewise.runs.dir import RunDir

LARGEST = {"loss": 7.5, "step": 3, "lane": 1, "samples": [4, 2]}
LINE = {"step": 4, "train/loss": 2.5, "train/grad_norm": None, "largest_loss": LARGEST}
COLUMNS = {"train/loss": 2.5, "train/grad_norm": None, "largest_loss": LARGEST}
STEP = ReplayedStep(4, 2.5, 8.0, COLUMNS, {"held_out/loss": 0.5}, {"model/w": "0a"})
WRITTEN = Written({4: {"model/w": "0a"}}, {4: LINE}, {4: {"held_out/loss": 0.5}})


def test_all_that_was_written_of_a_step_is_compared_but_its_times():
    line = {**LINE, "perf/samples_per_second": 3.0}
    found = compare_step(STEP, replace(WRITTEN, lines={4: line}))
    assert (found.comparison.num_compared, found.comparison.differing, found.code) == (5, {}, 0)
    assert found.notes() == []


@pytest.mark.parametrize(
    ("part", "changed", "name"),
    [
        ("lines", {**LINE, "largest_loss": {**LARGEST, "samples": [4, 3]}}, "largest_loss"),
        ("lines", {**LINE, "train/loss": 2.25}, "train/loss"),
        ("lines", {name: LINE[name] for name in ("train/grad_norm", "largest_loss")}, "train/loss"),
        ("evaluations", {"held_out/loss": 0.25}, "held_out/loss"),
        ("digests", {"model/w": "0b"}, "model/w"),
        ("digests", {}, "model/w"),
    ],
    ids=["largest loss", "loss", "removed number", "evaluation", "digest", "removed digest"],
)
def test_whatever_of_it_is_false_or_gone_is_a_difference(part, changed, name):
    found = compare_step(STEP, replace(WRITTEN, **{part: {4: changed}}))
    assert [*found.comparison.differing] == [name]
    assert found.code == 1
    assert replace(found, is_exact=False).code == 2


def test_what_differs_is_named_with_both_values():
    found = compare_step(STEP, Written({4: {"model/w": "0b", "model/v": "0c"}}))
    assert found.verdict()[1:] == [
        "  model/w: 0a, and 0b in the run",
        "  model/v: None, and 0c in the run",
    ]


@pytest.mark.parametrize(
    ("written", "last_line"),
    [
        (replace(WRITTEN, digests={}), "digests"),
        (replace(WRITTEN, lines={}, evaluations={}), "metrics, evaluation"),
        (replace(WRITTEN, others={4: ["jump line"]}), "jump line"),
    ],
)
def test_the_last_line_names_what_only_one_of_them_has(written, last_line):
    given = {**COLUMNS, "train/learning_rate": 0.1}
    found = compare_step(replace(STEP, columns=given), written)
    assert str(found).splitlines()[-1] == f"not compared, as only one has it: {last_line}"


def test_of_a_step_of_which_nothing_was_written_nothing_is_said():
    found = compare_step(STEP, Written({3: {"model/w": "0a"}}))
    assert found.code == 2
    assert "wrote nothing of it" in found.verdict()[0]


LANE = {"loss": 7.5, "samples": [4, 2], "inputs": "5a", "changed_sources": []}


@pytest.mark.parametrize(
    ("step", "lane", "found", "code"),
    [(3, 1, {}, 0), (3, 1, {"loss": 7.25}, 1), (3, 1, {"samples": [4, 3]}, 1), (3, 0, {}, 2), (2, 1, {}, 2)],
    ids=["equal", "another loss", "other samples", "another lane", "another step"],
)
def test_a_lane_is_compared_with_the_largest_loss_if_it_had_that(tmp_path, step, lane, found, code):
    """The line after step 4 has the largest loss since the line before it, which was that of step 3."""
    config = SimpleNamespace(distributed=SimpleNamespace(equality="exact"))
    plan = SimpleNamespace(run_dir=RunDir(tmp_path), step=step, written=WRITTEN, config=config, allow=())
    assert compare_lane({**LANE, **found}, plan, lane).code == code


@pytest.mark.parametrize("num_wrong", [1, 2, 3])
def test_the_chance_of_an_audit_is_that_of_counting(num_wrong):
    wrong = list(itertools.combinations(range(9), num_wrong))
    found = sum(min(steps) < 4 for steps in wrong)
    assert ReplayAudit(0, [], 9, 4).chance(num_wrong) == pytest.approx(found / len(wrong))


def test_the_sample_with_the_largest_loss_comes_first_and_nan_before_all():
    found = {"samples": [3, 5, 7], "loss": 1.0, "weight": 3.0, "scale": 1.0, "digests": {}, "norms": {}}
    alone = [(3, 1.0), (5, math.nan), (7, 4.0)]
    lines = lane_lines({**found, "missing": [], "alone": alone, "why_not": ""})
    assert [line.rpartition(" ")[2] for line in lines[-3:]] == ["5", "7", "3"]
