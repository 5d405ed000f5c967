"""Slurm's two nodes: what srun joins, how its tasks end together, and what a batch script does without it."""

import re
import shlex
import time

import pytest

from lanewise.processes.world.environment import _first_host
from tests.integration.command import ROOT, train, write_config
from tests.integration.failing import SECONDS_TO_END, STALL_SECONDS, under_slurm, write_faulty
from tests.integration.slurm import running_slurm, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TWO = ("--nodes=2", "--ntasks-per-node=1")
FOUR = ("--nodes=2", "--ntasks-per-node=2")
KILL = "--kill-on-bad-exit=1"
DOCS = (ROOT / "docs" / "launch.md").read_text()

# Under srun there is no RANK in the environment, by which the task decides who raises.
RANKED = """
import os
import tasks
tasks.RANK = int(os.environ.get("SLURM_PROCID", "0"))
RaisesInForward = tasks.RaisesInForward
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(write_config(folder)).require_success()
    return (folder / "run" / "model.safetensors").read_bytes()


@pytest.fixture
def digits(tmp_path):
    """A folder with the configuration that the documentation speaks of."""
    write_config(tmp_path).rename(tmp_path / "digits.yaml")
    return tmp_path


def documented(pattern: str) -> str:
    """The only place in docs/launch.md that matches."""
    (found,) = re.findall(pattern, DOCS, re.DOTALL | re.MULTILINE)
    return found


@pytest.mark.slow  # the batch script below contains the same command
def test_four_processes_on_two_nodes_leave_the_model_of_one(slurm, digits, on_one_process):
    command = shlex.split(documented(r"^    (srun --nodes[^\n]*)$"))
    assert command[:3] == ["srun", *FOUR]
    done = slurm.run(*command, cwd=digits).require_success()
    assert "4 processes on cpu" in done.stderr
    assert (digits / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.slow
def test_the_documented_batch_script_leaves_the_model_of_one(slurm, digits, on_one_process):
    (digits / "digits.sh").write_text(documented(r"^```bash\n(#!/bin/bash\n.*?)^```$"))
    assert slurm.run_batch("digits.sh", cwd=digits) == "COMPLETED"
    (log,) = digits.glob("digits-*.log")
    assert "4 processes on cpu" in log.read_text()
    assert (digits / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.slow
def test_a_batch_script_without_srun_trains_alone(slurm, digits, on_one_process):
    (digits / "alone.sh").write_text("#!/bin/bash\necho task $SLURM_PROCID\nlanewise train digits.yaml\n")
    assert slurm.run_batch(*FOUR, "--output=alone.log", "alone.sh", cwd=digits) == "COMPLETED"
    log = (digits / "alone.log").read_text()
    assert "task 0\n" in log
    assert "1 process on cpu" in log
    assert (digits / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.parametrize(
    ("options", "others_sleep_seconds"),
    [
        pytest.param((), 0, id="in-a-sum", marks=pytest.mark.slow),
        pytest.param((KILL,), 300, id="busy-elsewhere", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_raises_ends_all_of_them(slurm, tmp_path, options, others_sleep_seconds):
    (tmp_path / "ranked.py").write_text(RANKED)
    config = write_config(tmp_path, "ranked.RaisesInForward")
    sleep = ("--task.init_args.others_sleep_seconds", others_sleep_seconds)
    start = time.monotonic()
    done = slurm.run(
        *("srun", *TWO, *options, "lanewise", "train", config, *sleep),
        variables={"PYTHONPATH": str(tmp_path)},
    )
    assert time.monotonic() - start < 100
    assert done.code != 0
    assert done.leftover == []
    assert done.stderr.count("ValueError: the image is upside down") == 1, done.stderr
    assert done.stderr.count("Traceback") == 1
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    said = [name for name, log in logs.items() if "ValueError: the image is upside down" in log]
    assert said == ["rank-00001.log"]


def test_what_only_rank_0_finds_ends_all(slurm, digits):
    (digits / "run").mkdir()
    (digits / "run" / "metrics.jsonl").touch()
    start = time.monotonic()
    done = slurm.run("srun", *TWO, KILL, "lanewise", "train", "digits.yaml", cwd=digits)
    assert time.monotonic() - start < 100
    assert done.code != 0
    assert done.leftover == []
    assert done.stderr.count("holds a run already") == 1


@pytest.mark.parametrize(
    "written", ["node[1-2,07]", "gpu-a[003-010,12]", "login", "a[7-9]b[3,5]", "x-1,n[2-3]"]
)
def test_the_first_host_of_a_list_is_slurms(slurm, written):
    expanded = slurm.run("scontrol", "show", "hostnames", written).require_success().stdout
    assert _first_host(written) == expanded.split()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "says", "seconds"),
    [
        ("exception", 3, ("ValueError: the image is upside down", "rank 3 on", "forward"), SECONDS_TO_END),
        ("SIGKILL", 0, ("which rank 0 keeps, is lost",), SECONDS_TO_END),  # and what it did with it
        ("SIGSTOP", 2, ("rank 2 on", "forward"), STALL_SECONDS + SECONDS_TO_END),
    ],
)
def test_a_fault_is_told_once_for_each_node_and_leaves_nothing(slurm, tmp_path, fault, rank, says, seconds):
    ended = under_slurm(slurm, write_faulty(tmp_path, what=fault, rank=rank))
    (terminal,) = ended.terminals
    assert ended.seconds is not None, terminal.text
    assert ended.seconds < seconds, terminal.text
    assert terminal.code, terminal.text
    assert [text for text in says if text not in terminal.first_error] == []
    assert terminal.text.count("Traceback") <= 2, terminal.text
    assert [name for name in ended.left if not name.startswith("torchinductor_")] == []
