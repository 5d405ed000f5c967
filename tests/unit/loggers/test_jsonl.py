"""metrics.jsonl: strict JSON, one line a step."""

import json

import pytest

from lanewise.loggers.jsonl import JsonlLogger


def strict(line: str) -> dict:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def lines_of(path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


def test_one_line_for_each_step(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.on_step(0, 0, {"train/loss": 2.5, "perf/samples_per_second": 100.0})
    logger.on_step(1, 7, {"train/loss": 0.125})
    logger.on_end(None)
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"epoch": 0, "step": 0, "train/loss": 2.5, "perf/samples_per_second": 100.0},
        {"epoch": 1, "step": 7, "train/loss": 0.125},
    ]


def test_the_keys_stay_in_order(tmp_path):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {"z": 1.0, "a": 2.0})
    logger.on_end(None)
    assert (tmp_path / "m").read_text() == '{"epoch": 0, "step": 0, "z": 1.0, "a": 2.0}\n'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_json_lacks_becomes_null(tmp_path, value):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {"train/loss": value, "train/lr": 1e-3})
    logger.on_end(None)
    assert lines_of(tmp_path / "m") == [{"epoch": 0, "step": 0, "train/loss": None, "train/lr": 1e-3}]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0])
def test_a_float_comes_back_bit_for_bit(tmp_path, value):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {"train/loss": value})
    logger.on_end(None)
    (line,) = lines_of(tmp_path / "m")
    assert line["train/loss"].hex() == value.hex()


def test_a_run_that_fails_before_its_first_step_leaves_no_file(tmp_path):
    JsonlLogger(tmp_path / "m").on_end(None)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_there_from_the_first_step_on(tmp_path):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {})
    assert (tmp_path / "m").exists()
    logger.on_end(None)


def test_a_line_is_written_when_its_step_ends(tmp_path):
    logger = JsonlLogger(tmp_path / "m")
    logger.on_step(0, 0, {"train/loss": 1.0})
    try:
        assert lines_of(tmp_path / "m") == [{"epoch": 0, "step": 0, "train/loss": 1.0}]
    finally:
        logger.on_end(None)


def test_what_is_there_is_kept(tmp_path):
    for step in range(2):
        logger = JsonlLogger(tmp_path / "m", first_step=step)
        logger.on_step(0, step, {})
        logger.on_end(None)
        logger.on_end(None)  # harmless
    assert lines_of(tmp_path / "m") == [{"epoch": 0, "step": 0}, {"epoch": 0, "step": 1}]


def test_a_run_that_goes_on_cuts_the_lines_that_it_writes_again(tmp_path):
    path = tmp_path / "m"
    path.write_text('{"epoch": 0, "step": 0}\n{"epoch": 0, "step": 1}\n{"epoch": 0, "st')
    JsonlLogger(path, first_step=1)
    assert lines_of(path) == [{"epoch": 0, "step": 0}]


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_run_that_evaluates_again_cuts_what_that_evaluation_gave(tmp_path, evaluates_first):
    path = tmp_path / "m"
    steps = ['{"step": 0}\n', '{"step": 0, "test/loss": 3}\n', '{"step": 1}\n']
    evaluation = '{"step": 1, "test/loss": 2}\n'
    path.write_text("".join([*steps, evaluation, '{"step": 2}\n']))
    JsonlLogger(path, 2, evaluates_first=evaluates_first)
    assert path.read_text() == "".join(steps if evaluates_first else [*steps, evaluation])
