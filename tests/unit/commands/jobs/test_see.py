"""What a host sees of a run."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from lanewise.commands.jobs.see import see
from lanewise.processes.device.determinism import exact_pins
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.dir import RunDir
from lanewise.runs.record import RunRecord

PINS = exact_pins(torch.device("cpu"))


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path)
    RunRecord(run_dir.record).begin({"first_step": 1, "launch": "one"})
    return run_dir


def test_an_empty_folder_has_nothing(tmp_path):
    sight = see("close", "cpu", RunDir(tmp_path / "none"), "one")
    assert asdict(sight) == {
        "holds_launch": False,
        "saved_step": 0,
        "steps_lost": None,
        "idle_seconds": None,
        "pins": {},
        "pins_of_run": {},
    }


def test_a_run_has_its_launches_its_newest_checkpoint_and_what_was_lost_since(run_dir):
    pins = {"torch": "2", "gpu": "H100"}
    for step in (4, 8):
        folder = run_dir.checkpoints / f"step-{step:06d}"
        folder.mkdir(parents=True)
        Manifest(step, None, {"exact": {"threads": 1, "random_numbers": 2, **pins}}, ()).write(folder)
    run_dir.metrics.write_text(json.dumps({"step": 11}) + "\n")
    os.utime(run_dir.metrics, (0, run_dir.metrics.stat().st_mtime - 60))
    sight = see("exact", "cpu", run_dir, "one")
    assert (sight.holds_launch, sight.saved_step, sight.steps_lost) == (True, 8, 3)
    assert sight.idle_seconds is not None
    assert sight.idle_seconds >= 60
    assert (sight.pins, sight.pins_of_run) == (PINS, pins)
    assert not see("exact", "cpu", run_dir, "two").holds_launch


@pytest.mark.slow
def test_it_is_a_program_that_prints_json(run_dir):
    program = (sys.executable, "-P", "-m", "lanewise.commands.jobs.see", "exact", "auto", run_dir.path, "one")
    printed = subprocess.run(list(map(str, program)), check=True, capture_output=True, text=True).stdout
    assert json.loads(printed)["holds_launch"]
