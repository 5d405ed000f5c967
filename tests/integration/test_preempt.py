"""Signals and crashes: a run saves, or is started again, and then ends like one left alone."""

import os
import signal
import time
from contextlib import suppress
from functools import partial

import pytest

from tests.integration import mpirun
from tests.integration.command import (
    LANEWISE,
    TORCHRUN,
    Cold,
    Command,
    Done,
    Warm,
    train,
    wait_for,
    write_config,
)
from tests.slow import slow
from tests.soak.kill_and_resume import losses, result, write_noisy

"""Of a case that `make test` leaves to `make test-all`: the other of two signals to the same processes."""
SLOWLY = ("--task.init_args.sleep_seconds", 0.1)

under_torchrun = partial(Cold, *TORCHRUN, 2, "-m", "lanewise")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(write_noisy(folder)).require_success()
    return folder


def stop(folder, act, *arguments: object, start=Warm) -> Done:
    """Begin a run, tell it to stop in the middle of a step, and check that it saved and left nothing."""
    config = write_noisy(folder, checkpoint={})  # only what the signal makes it save
    with start("train", config, *SLOWLY, *arguments) as command:
        wait_for((folder / "run" / "metrics.jsonl").exists)
        act(command)
        done = command.finish()
    assert done.leftover == []
    num_steps = len(losses(folder / "run"))
    assert 1 <= num_steps < 12
    saved = [path.name for path in folder.glob("run/checkpoints/*")]
    assert saved == [f"step-{num_steps:06d}"], done.stderr
    assert not (folder / "run" / "model.safetensors").exists()
    return done


def says_so(done: Done) -> None:
    """Check that a stopped run ends with its own exit code and one line."""
    assert done.code == 75, done.stderr
    assert len([line for line in done.stderr.splitlines() if "a signal stopped the run" in line]) == 1
    assert "Traceback" not in done.stderr
    assert done.errors == []


def go_on(folder, devices: int) -> None:
    train(folder / "config.yaml", "--resume", "--distributed.devices", devices).require_success()


@pytest.mark.parametrize(("sign", "num_workers"), [(signal.SIGTERM, 1), *slow((signal.SIGUSR2, 0))])
def test_a_signal_to_the_launcher_saves_and_stops(tmp_path, whole, sign, num_workers):
    arguments = ("--distributed.devices", 2, "--data.num_workers", num_workers)
    says_so(stop(tmp_path, lambda command: os.kill(command.pid, sign), *arguments))
    go_on(tmp_path, 3)
    assert result(tmp_path) == result(whole)


@pytest.mark.parametrize(("sign", "num_workers"), [*slow((signal.SIGTERM, 1)), (signal.SIGUSR1, 0)])
def test_a_signal_to_a_single_process_saves_and_stops(tmp_path, whole, sign, num_workers):
    arguments = ("--data.num_workers", num_workers)
    says_so(stop(tmp_path, lambda command: os.kill(command.pid, sign), *arguments))
    go_on(tmp_path, 2)
    assert result(tmp_path) == result(whole)


@pytest.mark.parametrize(("sign", "rank"), slow((signal.SIGTERM, 1), (signal.SIGUSR1, 0)))
def test_a_signal_to_one_rank_alone_saves_and_stops_all(tmp_path, whole, sign, rank):
    says_so(stop(tmp_path, lambda command: os.kill(command.worker(rank), sign), "--distributed.devices", 2))
    go_on(tmp_path, 1)
    assert result(tmp_path) == result(whole)


@pytest.mark.parametrize(
    ("sign", "devices"),
    [
        (signal.SIGUSR2, 2),
        *slow((signal.SIGTERM, 1), (signal.SIGTERM, 2), (signal.SIGUSR1, 1)),
    ],
)
def test_a_signal_to_every_process_with_its_loader_workers_saves_and_stops(tmp_path, whole, sign, devices):
    def act(command: Command) -> None:
        for pid in command.pids():
            os.kill(pid, sign)

    says_so(stop(tmp_path, act, "--distributed.devices", devices, "--data.num_workers", 1))
    go_on(tmp_path, 3 - devices)
    assert result(tmp_path) == result(whole)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_and_stops(tmp_path, whole):
    done = stop(tmp_path, lambda command: os.kill(command.pid, signal.SIGTERM), start=under_torchrun)
    assert done.code != 0
    assert "error:" not in done.stderr
    go_on(tmp_path, 1)
    assert result(tmp_path) == result(whole)


@pytest.mark.slow
def test_a_signal_to_one_rank_under_torchrun_saves_and_stops_all(tmp_path, whole):
    stop(tmp_path, lambda command: os.kill(command.worker(1), signal.SIGUSR1), start=under_torchrun)
    go_on(tmp_path, 3)
    assert result(tmp_path) == result(whole)


@pytest.mark.slow
@pytest.mark.skipif(mpirun.WHY_NOT is not None, reason=str(mpirun.WHY_NOT))
def test_a_signal_to_mpirun_saves_and_stops(tmp_path, whole):
    under_mpirun = partial(Cold, *mpirun.MPIRUN, "-n", 2, *mpirun.meeting(), *LANEWISE)
    done = stop(tmp_path, lambda command: os.kill(command.pid, signal.SIGUSR2), start=under_mpirun)
    assert done.code == 75
    assert done.errors == []
    go_on(tmp_path, 1)
    assert result(tmp_path) == result(whole)


@pytest.mark.parametrize("devices", [1, 2])
def test_before_the_first_step_a_signal_ends_the_run_at_once(tmp_path, devices):
    config = write_config(tmp_path, "tasks.Stuck", distributed={"devices": devices})
    (tmp_path / "temporary").mkdir()
    with Warm("train", config, variables={"TMPDIR": str(tmp_path / "temporary")}) as command:
        wait_for((tmp_path / "run" / "logs").exists if devices == 1 else lambda: len(command.pids()) == 3)
        os.kill(command.pid, signal.SIGTERM)
        says_so(command.finish())
    assert not [*(tmp_path / "temporary").iterdir()]


def test_a_signal_where_python_ignores_errors_is_not_lost(tmp_path):
    """It was raised as an error, which 1 of 1,200 runs lost in an import, whose locks have such callbacks."""
    says_so(train(write_config(tmp_path, "tasks.SignalledWhereErrorsAreLost")))


@pytest.mark.parametrize(("when", "devices"), [("alone", 1), ("launched", 2), ("shutdown", 1)])
def test_after_the_last_step_a_signal_changes_nothing(tmp_path, when, devices):
    callback = {"class_path": "tasks.SignalAtTheEnd", "init_args": {"when": when}}
    config = write_config(tmp_path, distributed={"devices": devices}, callbacks=[callback])
    train(config).require_success()
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_second_signal_ends_a_single_process_at_once(tmp_path):
    config = write_noisy(tmp_path)
    slowly = ("--task.init_args.sleep_seconds", 5, "--task.init_args.folder", tmp_path)
    with Warm("train", config, *slowly, variables={"ATTEMPT": "first"}) as command:
        wait_for(lambda: [*tmp_path.glob("first-*")])  # it is in the first lane
        with suppress(ProcessLookupError):  # it is gone a moment before `poll` knows
            while command.poll() is None:
                os.kill(command.pid, signal.SIGTERM)
                time.sleep(0.1)
        assert command.finish().code == -signal.SIGTERM


@pytest.mark.parametrize("every_steps", [2, *slow(100)])
def test_a_rank_that_dies_once_is_started_again_and_the_run_ends_the_same(tmp_path, whole, every_steps):
    config = write_noisy(tmp_path, task="tasks.KilledOnce", every_steps=every_steps)
    mark = tmp_path / "mark"
    done = train(
        config,
        *("--task.init_args.mark", mark, "--distributed.devices", 2, "--distributed.max_restarts", 1),
    ).require_success()
    assert mark.exists()
    assert ("steps were taken" in done.stderr) == (every_steps == 2)
    assert result(tmp_path) == result(whole)


def test_a_rank_that_dies_more_often_than_max_restarts_is_an_error(tmp_path):
    config = write_noisy(tmp_path, task="tasks.KilledOnce")
    mark = tmp_path / "no such folder" / "mark"
    arguments = ("--task.init_args.mark", mark, "--distributed.devices", 2, "--distributed.max_restarts", 1)
    done = train(config, *arguments)
    assert done.code == 1
    assert len(done.errors) == 1
    assert "FileNotFoundError" in done.stderr
    assert done.leftover == []
