"""Runs on streams that are killed, and streams that fail: nothing is lost, repeated or saved wrong."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.integration.command import Command, Warm, train, wait_for, write_config
from tests.patience import patient
from tests.slow import slow
from tests.soak.kill_and_resume import result

NUM_STEPS = 20
"""Nearly three epochs of seven steps."""


def write_streaming(folder: Path, kind: str, fault: str = "", **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    given = {
        "train": {"max_steps": NUM_STEPS, "run_dir": str(folder / "run")},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
        "checkpoint": {"every": {"steps": 2}},
    }
    return write_config(folder, "stream_tasks.Streaming", {"kind": kind, "fault": fault}, **given | sections)


def num_lines(folder: Path, command: Command) -> int:
    """Count the steps that were logged; many when the command has ended."""
    path = folder / "run" / "metrics.jsonl"
    ended = command.poll() is not None
    return NUM_STEPS + 1 if ended else path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("kind", "shuffle_buffer", "num_kills"),
    [
        ("PlainWithState", 5, 1),
        *slow(
            ("Lanes", 5, 2),
            ("PlainWithState", 0, 2),
            ("Lanes", 0, 5),
            ("LanesWithState", 5, 5),
            ("Plain", 5, 5),
            ("PlainWithState", 5, 5),
        ),
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_never_was(
    tmp_path, kind, shuffle_buffer, num_kills
):
    data = {"shuffle_buffer": shuffle_buffer}
    whole = write_streaming(tmp_path / "whole", kind, data=data)
    train(whole).require_success()
    config = write_streaming(tmp_path / "killed", kind, data=data)
    random = Random(f"{kind} {shuffle_buffer}")
    options = ("--resume", "--task.init_args.sleep_seconds", 0.02)
    for _ in range(num_kills):
        layout = ("--distributed.devices", random.randint(1, 4), "--data.num_workers", random.randint(0, 2))
        with Warm("train", config, *options, *layout) as command:
            due = num_lines(config.parent, command) + random.randint(1, NUM_STEPS // num_kills)
            wait_for(lambda due=due, command=command: num_lines(config.parent, command) >= due)
            for pid in command.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            done = command.finish()
        assert done.leftover == []
    train(config, "--resume", "--distributed.devices", 3).require_success()
    assert result(config.parent) == result(whole.parent)


@pytest.mark.parametrize(("devices", "num_workers"), [(1, 0), (2, 1)])
def test_a_stream_that_raises_ends_the_run_with_its_lane(tmp_path, devices, num_workers):
    config = write_streaming(tmp_path, "Lanes", "raise", data={"num_workers": num_workers})
    done = train(config, "--distributed.devices", devices)
    assert done.code == 1
    assert done.stderr.count("OSError: the connection was lost") >= 1
    assert "in lane 3 of the stream, epoch 1" in done.stderr
    assert done.leftover == []


def test_a_stream_that_never_yields_is_named_by_its_phase(tmp_path):
    limit = patient(5)
    config = write_streaming(
        tmp_path, "Lanes", "never", distributed={"devices": 2, "stall_seconds": patient(5)}
    )
    done = train(config)
    assert done.code == 1
    assert f"error: no progress within distributed.stall_seconds={limit}." in done.stderr
    assert re.search(r"^rank 1 .*: in data of step 2 for \d+ s$", done.stderr, re.MULTILINE)
    assert "in iter_lane" in done.stderr


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loader_worker_that_dies_ends_the_run(tmp_path, devices):
    config = write_streaming(tmp_path, "Lanes", "die", data={"num_workers": 1})
    done = train(config, "--distributed.devices", devices)
    assert done.code == 1
    assert "DataLoader worker" in done.stderr
    assert done.leftover == []


def test_a_stream_that_yields_other_samples_when_the_run_resumes_is_an_error(tmp_path):
    marker = tmp_path / "marker"
    config = write_streaming(tmp_path, "Lanes", str(marker))
    train(config, "--train.max_steps", 3).require_success()
    marker.touch()
    done = train(config, "--resume", "--distributed.devices", 2)
    assert done.code == 2
    assert "its lanes have [2, 0, 0, 0] of them in step 4, and had [2, 0, 0, 2]" in done.errors[0]
    marker.unlink()
    train(config, "--resume").require_success()
    whole = write_streaming(tmp_path / "whole", "Lanes", str(marker))
    train(whole).require_success()
    assert result(tmp_path) == result(whole.parent)
