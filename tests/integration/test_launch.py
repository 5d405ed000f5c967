"""Several processes, started by lanewise or by torchrun: what they leave, and how they end together."""

import fcntl
import json
import os
import re
import signal
import sys
import termios
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.integration.command import (
    LANEWISE,
    TORCHRUN,
    Cold,
    Command,
    Done,
    Warm,
    run,
    train,
    wait_for,
    write_config,
)
from tests.listening import addresses, reserve_port

TWO = {"devices": 2}
OFTEN = "often by the kernel for want of memory: see dmesg."

ONE_MORE = pytest.mark.slow
"""Of a case that `make test` leaves to `make test-all`: another pair of what other cases show."""


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(write_config(folder)).require_success()
    return (folder / "run" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A run of two processes that print: how it ended and its folder."""
    folder = tmp_path_factory.mktemp("two")
    done = train(write_config(folder, "tasks.Chatty", distributed=TWO)).require_success()
    return done, folder / "run"


def test_two_processes_leave_the_model_of_one(chat, on_one_process):
    _, run_dir = chat
    assert (run_dir / "model.safetensors").read_bytes() == on_one_process


def test_a_run_leaves_a_line_of_metrics_for_each_step(chat):
    _, run_dir = chat
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in lines] == [
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 4),
        (2, 5),
        (2, 6),
    ]
    assert all(line["train/loss"] > 0 for line in lines)


def test_each_rank_has_a_log_and_the_console_is_rank_zeros(chat):
    done, run_dir = chat
    logs = {path.name: path.read_text() for path in (run_dir / "logs").iterdir()}
    assert sorted(logs) == ["rank-00000.log", "rank-00001.log"]
    assert done.stdout.splitlines() == ["python speaks on rank 0", "native code speaks on rank 0"]
    assert "rank 1" not in done.stderr
    assert logs["rank-00001.log"].splitlines() == ["python speaks on rank 1", "native code speaks on rank 1"]
    assert "3 in an epoch, 6 in all" in logs["rank-00000.log"]


def test_the_resolved_configuration_gives_the_same_bytes_again(chat, on_one_process, tmp_path):
    _, run_dir = chat
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["distributed"]["devices"] == 2
    train(run_dir / "config.yaml", "--train.run_dir", tmp_path / "other").require_success()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.parametrize(
    "command", [("train",), pytest.param(("verify", "--devices", 2, "--steps", 2), marks=ONE_MORE)]
)
def test_only_this_machine_can_call_a_run(tmp_path, command):
    name, *arguments = command
    config = write_config(tmp_path, distributed=TWO)
    found = set()
    with Warm(name, config, *arguments) as running:
        while running.poll() is None:
            found |= addresses(running.pids())
        running.finish().require_success()
    assert found == {"127.0.0.1"}


@pytest.mark.slow  # test_two_hosts.py joins those of two torchruns
def test_joining_the_processes_of_torchrun_gives_the_same_bytes(tmp_path, on_one_process):
    run(*TORCHRUN, 2, "-m", "lanewise", "train", write_config(tmp_path)).require_success()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=ONE_MORE), 1])
def test_the_exception_of_a_rank_is_shown_once(tmp_path, num_workers):
    path = write_config(tmp_path, "tasks.RaisesInForward", distributed=TWO, data={"num_workers": num_workers})
    shows_only(train(path), "ValueError: the image is upside down")
    log = (tmp_path / "run" / "logs" / "rank-00001.log").read_text()
    assert "ValueError: the image is upside down" in log


def test_an_exception_in_a_loader_worker_is_shown_once(tmp_path):
    path = write_config(tmp_path, "tasks.RaisesInSample", distributed=TWO, data={"num_workers": 1})
    done = train(path)
    assert done.code == 1
    assert done.stderr.count("error:") == 1
    assert done.stderr.count("OSError: the file of sample 13 is cut off") == 1
    assert "gloo" not in done.stderr
    assert done.leftover == []


def test_ranks_that_were_busy_elsewhere_do_not_hide_the_exception_of_another(tmp_path):
    path = write_config(tmp_path, "tasks.RaisesInForward", distributed=TWO)
    start = time.monotonic()
    done = train(path, "--task.init_args.others_sleep_seconds", 300)
    shows_only(done, "ValueError: the image is upside down")
    assert time.monotonic() - start < 100


def shows_only(done: Done, exception: str) -> None:
    """Check that rank 1's exception is what a run says of its end, with one traceback and no other error."""
    assert done.code == 1
    assert [line.partition(" on ")[0] for line in done.errors] == ["error: rank 1"]
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count(exception) == 1
    assert "reducer.py" not in done.stderr  # the frames of lanewise above the user's
    assert "in step 2, lane 2, samples [" in done.stderr
    assert "gloo" not in done.stderr
    assert done.leftover == []


@pytest.mark.parametrize("equality", ["exact", pytest.param("close", marks=ONE_MORE)])
@pytest.mark.parametrize("command", ["train", pytest.param("evaluate", marks=ONE_MORE)])
def test_exact_needs_equal_machines(tmp_path, command, equality):
    config = write_config(tmp_path, "tasks.Evaluated", distributed={"equality": equality})
    operands = [config]
    if command == "evaluate":
        train(config).require_success()
        operands = [tmp_path / "run", "--search_path", Path(__file__).parent]
    port = reserve_port()
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                Warm(
                    command,
                    *operands,
                    variables={
                        **world,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        # Torch reads it when it computes for the first time.
                        "ATEN_CPU_CAPABILITY": "default" if rank else None,
                    },
                )
            )
            for rank in range(2)
        ]
        dones = [one.finish() for one in both]
    if equality == "close":
        assert [done.code for done in dones] == [0, 0]
        return
    assert [done.code for done in dones] == [1, 1]
    (error,) = [error for done in dones for error in done.errors]
    assert "got cpu_capability=DEFAULT of rank 1 on " in error
    assert command == "evaluate" or not (tmp_path / "run" / "model.safetensors").exists()


def download(tmp_path, **init_args):
    path = write_config(tmp_path, distributed={"devices": 3})
    tree = {"class_path": "tasks.Downloads", "init_args": {"file": str(tmp_path / "file"), **init_args}}
    return train(path, "--task", json.dumps(tree))


def test_one_process_downloads_before_the_others(tmp_path):
    download(tmp_path).require_success()


@pytest.mark.parametrize(("fails", "said"), [("error", "OSError: no space left"), ("kill", "SIGKILL")])
def test_a_download_that_fails_ends_every_process(tmp_path, fails, said):
    done = download(tmp_path, fails=fails)
    assert done.code == 1
    assert [line[: len("error: rank 0")] for line in done.errors] == ["error: rank 0"]
    assert said in done.stderr
    assert done.leftover == []


@pytest.mark.parametrize(
    ("devices", "rank", "is_killed"), [(1, 0, False), (2, 0, False), (2, 1, False), (2, 0, True)]
)
def test_what_was_printed_before_the_end_is_not_lost(tmp_path, devices, rank, is_killed):
    """Where standard output is no terminal it was kept in a buffer, which a killed process lost."""
    callbacks = [{"class_path": "tasks.PrintsAndStarts"}]
    path = write_config(tmp_path, "tasks.PrintsAndRaises", callbacks=callbacks)
    ends = ("--task.init_args.rank", rank, "--task.init_args.is_killed", str(is_killed).lower())
    done = train(path, "--distributed.devices", devices, *ends, cwd=tmp_path)
    assert done.code == 1
    printed = {"printed in build_model", "printed in a callback", "printed in loss"}
    assert set(done.stdout.splitlines()) == printed
    log = (tmp_path / "run" / "logs" / f"rank-{devices - 1:05d}.log").read_text()
    assert devices == 1 or "printed in loss" in log


def test_the_exception_of_a_single_process_is_shown_once(tmp_path):
    done = train(write_config(tmp_path, "tasks.RaisesInForward"), "--task.init_args.rank", 0)
    assert done.code == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ValueError: the image is upside down") == 1
    assert "lanewise/" not in done.stderr.partition("Traceback")[2]
    assert "in step 2, lane 0, samples [" in done.stderr


OS = ("os", 2, "os._exit(0) was called before the end, in ")
SYS = ("sys", 2, "sys.exit(0) was called before the end, in ")
MUTE = ("mute", 1, "MuteError: <exception str() failed>")


@pytest.mark.parametrize(
    ("how", "code", "said", "devices"),
    [
        (*OS, 1),
        (*OS, 2),
        (*SYS, 1),
        pytest.param(*SYS, 2, marks=ONE_MORE),
        pytest.param(*MUTE, 1, marks=ONE_MORE),
        (*MUTE, 2),
    ],
)
def test_a_task_cannot_end_a_run_as_if_it_were_done(tmp_path, how, code, said, devices):
    path = write_config(tmp_path, "tasks.Ends", distributed={"devices": devices})
    done = train(path, "--task.init_args.how", how, "--task.init_args.rank", devices - 1)
    assert done.code == code
    assert done.stderr.count(said) == 1
    assert "gloo" not in done.stderr
    if devices == 2:
        assert len(done.errors) == 1
        assert "rank 1 on" in done.stderr
    if how != "os":
        assert any(f"lane {lane}, samples [" in done.stderr for lane in (0, 2))
    assert done.leftover == []


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_without_standard_streams_trains(tmp_path, devices):
    path = write_config(tmp_path, "tasks.Chatty", distributed={"devices": devices})
    without_streams = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    run(*without_streams, *LANEWISE, "train", path).require_success()
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("devices", [pytest.param(1, marks=ONE_MORE), 2])
def test_a_run_whose_output_nobody_reads_any_more_trains(tmp_path, devices):
    """As behind `| head -1`: its log has what the console misses."""
    path = write_config(tmp_path, "tasks.Chatty", distributed={"devices": devices})
    read, write = os.pipe()
    os.close(read)
    # A fork of the server holds what its stream could not write, where an interpreter writes no line before.
    cold = partial(Cold, *LANEWISE, stdout=write, stderr=write)
    with (cold if devices == 1 else partial(Warm, output=write))("train", path) as command:
        os.close(write)
        command.finish().require_success()
    assert (tmp_path / "run" / "model.safetensors").exists()
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert log.count("the console cannot be written any more (Broken pipe)") >= 1
    for said in ("python speaks on rank 0", "native code speaks on rank 0", "epoch 2  step 6/6  loss"):
        assert said in log


def end(folder, devices: int, num_workers: int, act, *, is_cold: bool = False) -> Done:
    """Begin a run, end it from outside in the middle of a step, and see what is left."""
    path = write_config(
        folder,
        "tasks.Slow",
        train={"max_steps": 100_000, "run_dir": str(folder / "run")},
        distributed={"devices": devices},
        data={"num_workers": num_workers},
    )
    with Cold(*LANEWISE, "train", path) if is_cold else Warm("train", path) as command:
        wait_for((folder / "run" / "metrics.jsonl").exists)
        # Several ranks have a launcher, and a cold one a process of its own from which it forks them.
        num_others = 0 if devices == 1 else 1 + is_cold
        assert len(command.pids()) == devices + num_others + devices * num_workers
        act(command)
        done = command.finish()
    assert done.leftover == []
    assert not (folder / "run" / "model.safetensors").exists()
    return done


@pytest.mark.parametrize(
    ("devices", "num_workers", "is_cold"),
    [
        pytest.param(1, 0, False, marks=ONE_MORE),
        (1, 1, False),
        (2, 0, False),
        pytest.param(2, 0, True, marks=ONE_MORE),
        pytest.param(2, 1, True, marks=ONE_MORE),
    ],
)
def test_ctrl_c_saves_and_ends_every_process(tmp_path, devices, num_workers, is_cold):
    done = end(tmp_path, devices, num_workers, Command.interrupt, is_cold=is_cold)
    assert done.code == 75, done.stderr
    *said, last = done.stderr.splitlines()
    assert "saving after this step; Ctrl-C again ends at once" in said  # on a line of its own
    assert re.fullmatch(
        r"a signal stopped the run after \d+ steps?, and a checkpoint was saved\. Go on with --resume\.", last
    )
    assert "Traceback" not in done.stderr


def num_unread(command: Warm) -> int:
    """Return how much a command has said on its standard error that was not read yet."""
    return int.from_bytes(fcntl.ioctl(command._outputs[1], termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=ONE_MORE), 2])
def test_ctrl_c_again_ends_every_process_at_once(tmp_path, devices):
    def interrupt_twice(command: Warm) -> None:
        for rank in range(devices) if devices > 1 else ():
            os.kill(command.worker(rank), signal.SIGSTOP)  # its step does not end before the second one
        unread = num_unread(command)
        command.interrupt()
        wait_for(lambda: num_unread(command) > unread)  # two at once would be one
        command.interrupt()

    done = end(tmp_path, devices, 0, interrupt_twice)
    assert done.code == 130, done.stderr
    assert done.stderr.splitlines()[-1].startswith("interrupted: ")
    assert "death signal" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("sign", "code", "num_workers"),
    [
        (signal.SIGTERM, 75, 0),
        pytest.param(signal.SIGTERM, 75, 1, marks=ONE_MORE),
        pytest.param(signal.SIGKILL, -9, 0, marks=ONE_MORE),
        pytest.param(signal.SIGKILL, -9, 1, marks=ONE_MORE),
    ],
)
def test_a_signal_to_the_launcher_ends_every_process(tmp_path, num_workers, sign, code):
    is_cold = sign == signal.SIGKILL  # it takes the process along from which it forks the ranks
    done = end(tmp_path, 2, num_workers, lambda command: os.kill(command.pid, sign), is_cold=is_cold)
    assert done.code == code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_a_signal_to_a_single_process_ends_its_loader_workers(tmp_path, sign, code):
    done = end(tmp_path, 1, 1, lambda command: os.kill(command.pid, sign))
    assert done.code == code


@pytest.mark.parametrize(("rank", "num_workers"), [(0, 1), (1, 0)])
def test_a_killed_rank_ends_every_process_and_is_named(tmp_path, rank, num_workers):
    done = end(tmp_path, 2, num_workers, lambda command: os.kill(command.worker(rank), signal.SIGKILL))
    assert done.code == 1
    assert done.errors[0].startswith(f"error: rank {rank} was killed by signal 9 (SIGKILL), {OFTEN} Its last")
    assert "gloo" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_the_process_that_ranks_are_forked_from_every_process_ends(tmp_path):
    done = end(tmp_path, 2, 1, lambda command: os.kill(command.server(), signal.SIGKILL), is_cold=True)
    assert done.code == 1
    assert done.errors == [f"error: the process that workers are forked from was killed, {OFTEN}"]
    assert "gloo" not in done.stderr
    assert "Traceback" not in done.stderr
