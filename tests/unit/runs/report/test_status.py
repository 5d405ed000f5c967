"""How a run stands, by the files that it left."""

import fcntl
import socket
import time

import pytest

from lanewise.runs.dir import RunDir
from lanewise.runs.report.runs import Runs
from lanewise.runs.report.status import find_runs, is_held, read_status
from tests.unit.runs.report.left import START, end, evaluation, step, write_run


def test_a_finished_run_has_its_last_values_and_the_best_one(tmp_path):
    lines = [step(1, 2.0), evaluation(20, 0.5, 0.9), step(40, 1.0), evaluation(40, 0.6, 0.8)]
    lines[2]["perf/samples_per_second"] = 250.0
    status = read_status(write_run(tmp_path, [START, end("finished", last_step=40)], lines))
    assert (status.state, status.step, status.last_step, status.loss) == ("finished", 40, 40, 1.0)
    assert status.evaluation == {"held_out/loss": 0.6, "held_out/accuracy": 0.8}
    assert status.best == ("held_out/accuracy", 20, 0.9)
    assert (status.devices, status.reducer) == ("2 x cpu", "ddp")
    assert (status.seconds, status.samples_per_second) == (60.0, 250.0)
    assert status.next_command == ""
    assert status.problems == []


def test_a_loss_is_best_where_it_is_lowest(tmp_path):
    start = {**START, "config": {"evaluate": {"best": "held_out/loss", "best_mode": None}}}  # as it once was
    lines = [evaluation(20, 0.5, 0.9), evaluation(40, 0.6, 0.8)]
    assert read_status(write_run(tmp_path, [start], lines)).best == ("held_out/loss", 20, 0.5)


@pytest.mark.parametrize(
    ("reason", "state"), [("error", "failed"), ("preempted", "preempted"), ("stopped early", "stopped early")]
)
def test_a_run_that_ended_before_its_end_says_why_and_how_to_go_on(tmp_path, reason, state):
    events = [START, end(reason, text="the first line\nthe second")]
    folder = write_run(tmp_path, events, [step(7, 1.0)])
    assert read_status(folder).next_command == ""  # nothing was saved
    (folder / "checkpoints" / "step-000005").mkdir(parents=True)
    status = read_status(folder)
    assert (status.state, status.step, status.error) == (state, 7, "the first line")
    going_on = f"lanewise train {folder}/config.yaml --resume --train.run_dir {folder}"
    assert status.next_command == going_on  # a run that was moved went on where it had been


def test_a_run_whose_lock_is_held_is_running_with_its_time_left(tmp_path):
    folder = write_run(tmp_path, [START], [step(1, 2.0), step(10, 1.0), step(20, 1.0)])
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = read_status(folder)
        assert (status.state, status.step, status.last_step) == ("running", 20, 40)
        assert status.seconds_left == pytest.approx(20)
        assert is_held(RunDir(folder))
    assert not is_held(RunDir(folder))


def test_a_run_on_a_stream_has_steps_and_no_time_left(tmp_path):
    folder = write_run(tmp_path, [{**START, "last_step": None}], [step(1, 2.0), step(20, 1.0)])
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = read_status(folder)
    assert (status.state, status.step, status.last_step, status.seconds_left) == ("running", 20, None, None)
    assert (status.loss, status.problems) == (1.0, [])


@pytest.mark.parametrize(("age", "state"), [(5, "running"), (10_000, "killed")])
def test_a_run_of_another_host_is_running_while_its_lines_are_young(tmp_path, age, state):
    line = {**step(3, 1.0), "time": time.time() - age}
    assert read_status(write_run(tmp_path, [START], [line])).state == state


def test_a_run_of_this_host_without_a_lock_was_killed(tmp_path):
    start = {**START, "hosts": {socket.gethostname(): 1}}
    line = {**step(3, 1.0), "time": time.time()}
    assert read_status(write_run(tmp_path, [start], [line])).state == "killed"


def test_a_damaged_folder_shows_what_is_there(tmp_path):
    folder = write_run(tmp_path / "a", [], [step(3, None), {"step": "x"}], text='{"step": 4, "train/lo')
    (folder / "run.jsonl").write_text("[]\n")
    status = read_status(folder)
    assert (status.state, status.step, status.loss) == ("unknown", 3, None)
    assert status.problems == [
        "run.jsonl: 1 line cannot be read, the first of them line 1",
        "metrics.jsonl: its last line is half-written",
    ]
    (folder / "run.jsonl").unlink()
    assert "run.jsonl is not there" in read_status(folder).problems


@pytest.mark.parametrize("start", [{"devices": 3, "hosts": [], "config": []}, {"time": 5, "last_step": "x"}])
def test_a_start_of_another_version_may_have_anything(tmp_path, start):
    status = read_status(write_run(tmp_path, [{**START, **start}], [step(1, 1.0)]))
    assert status.step == 1


HUGE = 10**400


@pytest.mark.parametrize(
    "line",
    [{"train/loss": HUGE}, {"time": HUGE}, {"time": 1e308}, {"step": HUGE}, {"held_out/loss": HUGE}],
    ids=["loss", "time", "late", "step", "evaluation"],
)
@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+10:00", "9999-12-31T23:59:59-10:00"])
def test_numbers_that_nothing_can_hold_are_left_out(tmp_path, line, moment):
    """One run ended the table of all."""
    lines = [step(1, 1.0), {**step(2, 1.0), **line}]
    folder = write_run(tmp_path, [{**START, "time": moment}], lines)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = read_status(folder)
    assert status.state == "running"
    assert list(Runs(tmp_path, [status]).lines())


@pytest.mark.parametrize(
    "number", ["1" * 6000, "1" * 4000, "-1"], ids=["6000 digits", "4000 digits", "negative"]
)
def test_a_step_that_no_run_takes_is_none(tmp_path, number):
    """One of 4,000 digits, which Python reads, was a column of the table of runs."""
    text = f'{{"epoch": 1, "step": {number}, "time": 1.0}}\n'
    folder = write_run(tmp_path, [START], [step(1, 1.0)], text)
    with (folder / "run.jsonl").open("a") as file:
        file.write(f'{{"event": "end", "reason": "finished", "last_step": {number}}}\n')
    assert read_status(folder).step == 1


def test_runs_are_found_below_a_folder_and_not_inside_of_each_other(tmp_path):
    for name in ("a", "deep/b", "a/inside", "deep/er/and/too/deep"):
        write_run(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert list(find_runs(tmp_path)) == [tmp_path / "a", tmp_path / "deep" / "b"]
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"]
    assert list(find_runs(tmp_path / "nowhere")) == []


def test_an_event_is_no_evaluation(tmp_path):
    digests = {"event": "digests", "step": 20, "time": 1.0, "digests": {"model/weight": "00"}}
    write_run(tmp_path, [START], [step(10, 2.0), evaluation(20, 0.5, 0.9), digests])
    assert read_status(tmp_path).evaluation == {"held_out/loss": 0.5, "held_out/accuracy": 0.9}
