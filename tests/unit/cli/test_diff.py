"""The exit codes are those of diff, and the JSON has what is printed."""

import json
from typing import Any

import pytest

from lanewise.cli.main import main

START: dict[str, Any] = {
    "event": "start",
    "first_step": 1,
    "config": {
        "train": {"seed": 0},
        "batch": {"global_batch_size": 8},
        "distributed": {"equality": "close"},
    },
    "versions": {"torch": "2.13.0"},
}
LINE = {"epoch": 1, "step": 4, "train/loss": 0.5, "train/learning_rate": 0.1}


@pytest.fixture
def runs(tmp_path):
    """Two runs in close, of one step each, of which no other file is there."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.jsonl").write_text(json.dumps(START) + "\n")
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    return tmp_path / "a", tmp_path / "b"


def test_equal_lines_are_the_same(runs, capsys):
    assert main(["diff", *map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the same, as far as metrics tell"


def test_other_lines_are_different_whatever_was_configured(runs, capsys):
    other = START | {"config": {**START["config"], "train": {"seed": "[red]1"}}}
    (runs[1] / "run.jsonl").write_text(json.dumps(other) + "\n")
    assert main(["diff", *map(str, runs)]) == 0
    (runs[1] / "metrics.jsonl").write_text(json.dumps(LINE | {"train/loss": 0.6}) + "\n")
    assert main(["diff", *map(str, runs)]) == 1
    *_, setting, _, metrics, result = capsys.readouterr().out.splitlines()
    assert setting.split() == ["config.train.seed", "0", "[red]1", "1"]
    assert metrics == "metrics: unequal at step 4: train/loss over 4 steps"
    assert result == "different, as runs in close may be by rounding, or by what differs above"
    assert main(["diff", *map(str, runs), "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    metrics = found["comparison"]["parts"]["metrics"]
    assert (metrics["first_unequal"], metrics["unequal"]) == (4, {"train/loss over 4 steps": [0.5, 0.6]})
    assert (found["same"], found["causes"], found["failure"]) == (False, [], None)


def test_what_cannot_be_compared_is_trouble(runs, capsys):
    (runs[1] / "metrics.jsonl").write_text(json.dumps(LINE | {"step": 5}) + "\n")
    assert main(["diff", *map(str, runs)]) == 2
    assert "have no line of the same step: their last ones are of steps 4 and 5." in capsys.readouterr().err
    (runs[0] / "run.jsonl").write_text(json.dumps(START | {"config": {"train": 5}}) + "\n")
    assert main(["diff", *map(str, runs)]) == 2
    assert f"error: {runs[0]}/run.jsonl cannot be read" in capsys.readouterr().err
    (runs[0] / "run.jsonl").unlink()
    assert main(["diff", *map(str, runs)]) == 2
    assert f"error: there is no run in {runs[0]} (run.jsonl)" in capsys.readouterr().err
