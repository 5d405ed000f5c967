"""The launcher slurm, on two nodes: what it submits, how it stops, and how it goes on after a requeue."""

import os
import re
import sys

import pytest

from tests.integration.command import LANEWISE, ROOT, Done, train, wait_for, write_config
from tests.integration.slurm import running_slurm, why_not
from tests.soak.kill_and_resume import losses, result, write_noisy

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

ON_TWO_NODES = ("--distributed.launcher", "slurm", "--distributed.nodes", 2, "--distributed.devices")
SCRIPT = """
import lanewise
from tests.integration.tasks import Evaluated

distributed = {"launcher": "slurm", "nodes": 2, "devices": 1, "device_type": "cpu"}
print(
    lanewise.train(
        Evaluated(),
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        train={"epochs": 1, "run_dir": "run"},
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        distributed=distributed,
    ).evaluation
)
"""
PYTHONPATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
SLOWLY = ("--task.init_args.sleep_seconds", 0.1)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(write_noisy(folder)).require_success()
    return folder


def submit(slurm, config, devices: int, *arguments: object) -> tuple[str, Done]:
    """Submit a run on both nodes; return the number of its job, and what was said."""
    done = slurm.run(*LANEWISE, "train", config, *ON_TWO_NODES, devices, *arguments, cwd=config.parent)
    done.require_success()
    (job,) = re.findall(r"^job (\d+) is submitted\.$", done.stdout, re.MULTILINE)
    return job, done


def log_of(folder, job: str) -> str:
    return (folder / "run" / "slurm" / f"{job}.log").read_text()


def begin(slurm, folder) -> str:
    """Submit a run that saves only if it is told to stop, and wait for a few steps."""
    job, _ = submit(slurm, write_noisy(folder, checkpoint={}), 1, *SLOWLY)
    metrics = folder / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(losses(folder / "run")) >= 2)
    return job


def goes_on(slurm, folder, job: str, num_starts: int = 2) -> None:
    """Check that a job that was put back into the queue goes on with the run."""
    slurm.start_again(job)
    assert slurm.wait_for_end(job) == "COMPLETED", log_of(folder, job)
    assert slurm.show(job)["Restarts"] == str(num_starts - 1)
    record = (folder / "run" / "run.jsonl").read_text()
    assert record.count('"event": "start"') == num_starts
    assert record.count('"reason": "preempted"') == num_starts - 1
    assert not re.search("^error:", log_of(folder, job), re.MULTILINE)


@pytest.mark.slow
def test_a_submitted_run_leaves_the_model_of_one_process(slurm, tmp_path):
    one = tmp_path / "one"
    one.mkdir()
    train(write_config(one)).require_success()
    job, done = submit(slurm, write_config(tmp_path), 2)
    assert f"scancel {job}" in done.stdout
    assert slurm.wait_for_end(job) == "COMPLETED", log_of(tmp_path, job)
    assert "4 processes on cpu" in log_of(tmp_path, job)
    assert (tmp_path / "run/model.safetensors").read_bytes() == (one / "run/model.safetensors").read_bytes()


@pytest.mark.slow
def test_in_an_allocation_a_run_uses_its_nodes(slurm, tmp_path):
    write_config(tmp_path)
    train_it = "lanewise train config.yaml --distributed.launcher slurm --distributed.devices 2"
    (tmp_path / "mine.sh").write_text(f"#!/bin/sh\n{train_it}\n")
    state = slurm.run_batch("--nodes=2", "--cpus-per-task=2", "--output=log", "mine.sh", cwd=tmp_path)
    log = (tmp_path / "log").read_text()
    assert state == "COMPLETED", log
    assert "node2: 2 processes" in log
    assert "4 processes on cpu" in log


@pytest.mark.slow
def test_from_python_a_run_waits_for_its_result(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = slurm.run(sys.executable, script, cwd=tmp_path, variables={"PYTHONPATH": PYTHONPATH})
    assert done.code == 0, done.stderr
    assert done.stdout.count("all/loss") == 1
    assert "is submitted" in done.stderr


@pytest.mark.slow
def test_a_run_that_is_requeued_saves_and_goes_on(slurm, tmp_path, whole):
    job = begin(slurm, tmp_path)
    slurm.run("scontrol", "requeue", job)  # it may ask twice, and be told that the job is pending
    goes_on(slurm, tmp_path, job)
    assert result(tmp_path) == result(whole)


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_puts_itself_back_into_the_queue(slurm, tmp_path, whole):
    job = begin(slurm, tmp_path)
    slurm.run("scancel", "--signal=TERM", job).require_success()
    goes_on(slurm, tmp_path, job)
    assert result(tmp_path) == result(whole)


@pytest.mark.slow
def test_a_run_whose_nodes_another_job_takes_saves_and_goes_on(slurm, tmp_path, whole):
    job = begin(slurm, tmp_path)
    urgent = ("--partition=urgent", "--exclusive", "--nodes=2", "--output=urgent.log", "--wrap=srun true")
    assert slurm.run_batch(*urgent, cwd=tmp_path) == "COMPLETED"
    goes_on(slurm, tmp_path, job)
    assert result(tmp_path) == result(whole)


@pytest.mark.slow
def test_a_run_that_is_cancelled_saves(slurm, tmp_path, whole):
    job = begin(slurm, tmp_path)
    slurm.run("scancel", job).require_success()
    assert slurm.wait_for_end(job) == "CANCELLED"
    num_steps = len(losses(tmp_path / "run"))
    wait_for((tmp_path / f"run/checkpoints/step-{num_steps:06d}").exists)
    train(tmp_path / "config.yaml", "--resume").require_success()
    assert result(tmp_path) == result(whole)
