"""The console: a line now and then, or a bar on a terminal."""

import sys
import threading
import time
from pathlib import Path

import pytest

from lanewise.processes.watch.heartbeat import EVALUATION, FORWARD, SAVE, heartbeat
from lanewise.runs.callback import RunStart
from lanewise.runs.loggers.progress import ProgressLogger
from tests.distributed.tasks import configure


@pytest.fixture(autouse=True)
def plain_console(monkeypatch):
    """Standard error is no terminal, whatever starts the tests."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test winds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def start(first_step: int, last_step: int | None) -> ProgressLogger:
    logger = ProgressLogger()
    config = configure("unused.Task", num_lanes=1)
    logger.on_start(RunStart(Path("unused"), "unused", config, first_step, last_step))
    return logger


def metrics(loss: float) -> dict[str, float]:
    return {"train/loss": loss, "perf/samples_per_second": 12345.6}


def test_a_notebook_gets_lines_without_codes_that_move_the_cursor(capsys, monkeypatch):
    """It asks for colours, as a terminal would."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    logger = start(1, 100)
    logger.on_step(1, 1, metrics(2.0))
    logger.on_end(None)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert shown.startswith("epoch 1  step 1/100  loss 2.0000")


def test_a_line_at_once_and_every_ten_seconds_and_at_the_end(capsys, clock):
    logger = start(1, 100)
    for step, seconds in enumerate([0, 1, 9.9, 10, 19.9, 20]):
        clock[0] = 1000 + seconds
        logger.on_step(step // 3 + 1, step + 1, metrics(step))
    logger.on_step(3, 99, metrics(98))
    logger.on_step(3, 100, metrics(99))
    logger.on_end(None)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "epoch 1  step 1/100  loss 0.0000  12,346 samples/s",
        "epoch 2  step 4/100  loss 3.0000  12,346 samples/s",
        "epoch 2  step 6/100  loss 5.0000  12,346 samples/s",
        "epoch 3  step 100/100  loss 99.0000  12,346 samples/s",
    ]


def test_a_loss_that_exploded_has_no_41_digits(capsys):
    logger = start(1, 1)
    logger.on_step(1, 1, metrics(9.9e40))
    logger.on_evaluation(1, 1, {"held_out/loss": 1e6, "held_out/accuracy": 0.5})
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1  step 1/1  loss 9.9e+40  12,346 samples/s",
        "epoch 1  after step 1  held_out/loss 1e+06  held_out/accuracy 0.5000",
    ]


def test_a_better_model_is_named(capsys):
    start(1, 1).on_best(1, 1, Path("runs/[a]/best.safetensors"))
    assert capsys.readouterr().err == "the best so far: runs/[a]/best.safetensors\n"


REPORTED = {"train/weight": 4.0, "train/accuracy": 0.5, "train/parts/kl": 12.25, "time/data_seconds": 1.0}


def test_what_the_loss_reports_stands_in_a_line(capsys):
    start(1, 1).on_step(1, 1, {**metrics(2.0), **REPORTED})
    said = "epoch 1  step 1/1  loss 2.0000  accuracy 0.5000  parts/kl 12.2500  12,346 samples/s\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("width", "shown"), [(80, 0), (106, 0), (107, 1), (124, 1), (125, 2), (200, 2)])
def test_beside_a_bar_it_stands_where_there_is_room(capsys, monkeypatch, width, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    logger = start(1, 100)
    logger.on_step(1, 1, {**metrics(2.0), **REPORTED})
    logger.on_end(None)
    printed = capsys.readouterr().err
    assert ["accuracy 0.5000" in printed, "parts/kl 12.2500" in printed] == [shown > 0, shown > 1]
    assert "12,346 samples/s" in printed


def test_the_line_of_a_run_whose_length_nobody_knows(capsys):
    start(1, None).on_step(2, 7, metrics(0.5))
    assert capsys.readouterr().err == "epoch 2  step 7  loss 0.5000  12,346 samples/s\n"


@pytest.mark.parametrize(("last_step", "shown"), [(9, ["7/9", "left"]), (None, ["7/?"])])
def test_a_bar_tells_the_time_left_where_the_length_is_known(capsys, monkeypatch, last_step, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logger = start(1, last_step)
    logger.on_step(2, 7, metrics(0.5))
    logger.on_end(None)
    printed = capsys.readouterr().err
    assert all(part in printed for part in ["elapsed", *shown])
    assert ("left" in printed) == ("left" in shown)


def test_a_resumed_run_counts_from_the_runs_first_step(capsys):
    logger = start(51, 100)
    logger.on_step(2, 51, metrics(0.5))
    logger.on_end(None)
    assert capsys.readouterr().err == "epoch 2  step 51/100  loss 0.5000  12,346 samples/s\n"


@pytest.mark.parametrize(("loss", "shown"), [(float("nan"), "loss nan"), (float("inf"), "loss inf")])
def test_a_loss_that_is_no_number_is_shown_as_such(capsys, loss, shown):
    start(1, 1).on_step(1, 1, metrics(loss))
    assert shown in capsys.readouterr().err


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    threads = set(threading.enumerate())
    logger = start(3, 8)
    for step in range(2, 8):
        logger.on_step(step // 4 + 1, step + 1, metrics(step))
    logger.on_end(None)
    for thread in set(threading.enumerate()) - threads:  # the one that redraws the bar was told to end
        thread.join(timeout=60)
        assert not thread.is_alive()
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.rpartition("epoch ")[2]
    assert last.startswith("2 ")
    for part in ("8/8", "loss 7.0000", "12,346 samples/s"):
        assert part in last
    assert printed.err.count("\n") < 6  # one bar, not a line for each step


def show_phase(capsys, monkeypatch, phase: str, evaluated: tuple[int, int] = (3, 12)) -> str:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(heartbeat, "note", (phase, 1, 0))
    monkeypatch.setattr(heartbeat, "evaluated", evaluated)
    start(1, 8).on_end(None)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("phase", "shown"), [(EVALUATION, ["evaluation", "3/12"]), (SAVE, ["save"]), (FORWARD, [])]
)
def test_a_second_bar_moves_while_an_evaluation_or_a_save_goes_on(capsys, monkeypatch, phase, shown):
    printed = show_phase(capsys, monkeypatch, phase)
    for part in shown:
        assert part in printed
    assert ("3/12" in printed) is (phase == EVALUATION)


def test_the_second_bar_counts_where_nobody_knows_how_many_there_are(capsys, monkeypatch):
    assert "3/?" in show_phase(capsys, monkeypatch, EVALUATION, (3, 0))


def test_a_bar_begins_where_the_run_resumes(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    start(7, 8).on_end(None)
    printed = capsys.readouterr().err
    assert "6/8" in printed
    assert "epoch" not in printed  # nobody knows it before the first step: it was 0
    assert "0:00:00" in printed  # the time goes on where steps are slow and few of them logged


def test_a_line_of_values_is_broken_between_them_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logger = ProgressLogger()
    logger.on_evaluation(12, 3400, {"held_out/loss": 1.25, "held_out/accuracy": 0.5, "held_out/f1": 0.25})
    assert capsys.readouterr().err.splitlines() == [
        "epoch 12  after step 3400  held_out/loss 1.2500",
        "    held_out/accuracy 0.5000  held_out/f1 0.2500",
    ]
