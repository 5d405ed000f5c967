"""The weights of a run are the best ones where it keeps them, and a line says which they are."""

from pathlib import Path

import pytest

from lanewise.errors import CheckpointError
from lanewise.runs.dir import RunDir
from lanewise.runs.report.status import read_status
from lanewise.runs.report.weights import find_weights, written_at
from tests.unit.runs.report.left import START, end, evaluation, step, write_run

LINES = [step(1, 2.0), evaluation(20, 0.5, 0.9), step(40, 1.0), evaluation(40, 0.6, 0.8)]
FINISHED = [START, end("finished", last_step=40)]


def run_with(folder: Path, *names: str) -> RunDir:
    write_run(folder, FINISHED, LINES)
    for name in names:
        (folder / f"{name}.safetensors").touch()
    return RunDir(folder)


def test_the_best_are_taken_where_there_are_some(tmp_path):
    """All but a look into the folder took the last ones, though the best were kept beside them."""
    run = run_with(tmp_path, "model", "best")
    best = (run.best_model, "weights: best, of step 20 by held_out/accuracy")
    assert find_weights(tmp_path) == find_weights(tmp_path, "best") == best
    assert find_weights(tmp_path, "last") == (run.model, "weights: last, of step 40")


def test_without_a_best_the_last_are_taken_and_the_best_cannot_be_asked_for(tmp_path):
    run = run_with(tmp_path, "model")
    assert find_weights(tmp_path) == (run.model, "weights: last, of step 40")
    for name in ("best", "bset"):
        with pytest.raises(CheckpointError, match=rf"no weights called {name}: .* best needs evaluate\.best"):
            find_weights(tmp_path, name)


def test_a_run_that_went_on_without_a_best_stands_for_its_last_weights(tmp_path):
    """The best ones of before were taken, though the run was told to keep none any more."""
    run = run_with(tmp_path, "model", "best")
    write_run(tmp_path, [*FINISHED, {**START, "config": {"evaluate": {"best": None}}}, FINISHED[1]], LINES)
    assert find_weights(tmp_path) == (run.model, "weights: last, of step 40")
    assert find_weights(tmp_path, "best")[0] == run.best_model


def test_of_the_last_ones_the_average_counts(tmp_path):
    run = run_with(tmp_path, "model", "averaged")
    assert find_weights(tmp_path) == (run.averaged_model, "weights: last, of step 40")
    assert find_weights(tmp_path, averages=False)[0] == run.model
    assert find_weights(tmp_path, averages=True)[0] == run.averaged_model


def test_a_run_that_was_killed_while_it_went_on_has_the_weights_of_its_end_before(tmp_path):
    """The last line of metrics was taken for theirs."""
    later = {**START, "id": "b", "first_step": 41, "last_step": 80}
    write_run(tmp_path, [*FINISHED, later], [*LINES, step(60, 0.9)])
    assert written_at(RunDir(tmp_path))[RunDir(tmp_path).model] == (40, "")


def test_the_step_of_the_best_is_looked_for_in_all_metrics(tmp_path):
    """`lanewise runs` reads the end of them only, where a later evaluation may be the best."""
    run = run_with(tmp_path, "best")
    long = {"step": 30, "note": "x" * 2**23}
    write_run(tmp_path, FINISHED, [*LINES[:2], *[long] * 2, *LINES[2:]])
    assert read_status(tmp_path).best == ("held_out/accuracy", 40, 0.8)
    assert find_weights(tmp_path) == (run.best_model, "weights: best, of step 20 by held_out/accuracy")


def test_a_folder_that_tells_nothing_is_taken_by_its_files(tmp_path):
    (tmp_path / "best.safetensors").touch()
    assert find_weights(tmp_path) == (tmp_path / "best.safetensors", "weights: best")
