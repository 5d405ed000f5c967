"""mpirun: what it joins, how its processes end together, and what it must be told."""

import re
import shlex
import sys

import pytest

from tests.integration import slurm
from tests.integration.command import LANEWISE, ROOT, Done, run, train, write_config
from tests.integration.mpirun import MPIRUN, WHY_NOT, meeting
from tests.integration.test_launch import shows_only

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

DOCS = (ROOT / "docs" / "launch.md").read_text()
TWO = ("-n", 2)


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(write_config(folder)).require_success()
    return (folder / "run" / "model.safetensors").read_bytes()


def mpirun(*arguments: object) -> Done:
    return run(*MPIRUN, *arguments)


@pytest.mark.slow
def test_two_processes_leave_the_model_of_one(tmp_path, on_one_process):
    done = mpirun(*TWO, *meeting(), *LANEWISE, "train", write_config(tmp_path)).require_success()
    assert "2 processes on cpu" in done.stderr
    assert done.stderr.count("trained 6 steps") == 1
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.slow
def test_the_documented_command_leaves_the_model_of_one(tmp_path, on_one_process):
    (documented,) = re.findall(r"^    mpirun ([^\n]*) lanewise train digits.yaml ", DOCS, re.MULTILINE)
    options = shlex.split(documented)
    assert options == ["-n", "2", "-x", "MASTER_ADDR=127.0.0.1", "-x", "MASTER_PORT=29400"]
    mpirun(*options, *LANEWISE, "train", write_config(tmp_path)).require_success()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.slow
def test_one_process_trains_alone(tmp_path, on_one_process):
    done = mpirun("-n", 1, *LANEWISE, "train", write_config(tmp_path)).require_success()
    assert "1 process on cpu" in done.stderr
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == on_one_process


@pytest.mark.slow
def test_without_a_place_to_meet_nothing_is_trained(tmp_path):
    done = mpirun(*TWO, *LANEWISE, "train", write_config(tmp_path))
    assert done.code == 1
    assert done.leftover == []
    (said,) = set(done.errors)
    assert "do not know where they meet, without MASTER_ADDR and MASTER_PORT." in said
    assert "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29400 ..." in said
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("others_sleep_seconds", [0, 300])
def test_the_exception_of_a_rank_is_shown_once_and_ends_all(tmp_path, others_sleep_seconds):
    config = write_config(tmp_path, "tasks.RaisesInForward")
    sleep = ("--task.init_args.others_sleep_seconds", others_sleep_seconds)
    shows_only(
        mpirun(*TWO, *meeting(), *LANEWISE, "train", config, *sleep), "ValueError: the image is upside down"
    )


@pytest.mark.slow
def test_exact_on_unequal_machines_is_refused_once(tmp_path):
    one = ("-n", 1, *meeting())
    command = (*LANEWISE, "train", write_config(tmp_path))
    done = mpirun(*one, *command, ":", *one, "-x", "ATEN_CPU_CAPABILITY=default", *command)
    assert done.code == 1
    assert len(done.errors) == 1
    assert "got cpu_capability=DEFAULT of rank 1 on " in done.errors[0]


OWN_LOOP = """
import lanewise
lanes = lanewise.Lanes(global_batch_size=8, micro_batch_size=2, equality="exact")
assert lanes.rank != 1, "upside down"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ((), "AssertionError: upside down"),
        (("-x", "ATEN_CPU_CAPABILITY=default"), "got cpu_capability=DEFAULT of rank 1 on "),
    ],
)
def test_the_error_of_an_own_loop_is_shown_once(tmp_path, variables, says):
    (tmp_path / "own_loop.py").write_text(OWN_LOOP)
    command = ("-n", 1, *meeting(), sys.executable, tmp_path / "own_loop.py")
    done = mpirun(*command, ":", *command[:-2], *variables, *command[-2:])
    assert done.code == 1
    assert len(done.errors) == 1, done.stderr
    assert done.stderr.count(says) == 1
    assert done.leftover == []


@pytest.mark.slow
@pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not()))
def test_in_a_job_of_slurm_the_processes_are_those_of_mpirun(tmp_path, on_one_process):
    """It starts its daemons by srun, whose variables say that there are two tasks."""
    (tmp_path / "slurm").mkdir()
    with slurm.running_slurm(tmp_path / "slurm") as cluster:
        allocate = ("salloc", "--nodes=2", "--ntasks-per-node=2")
        line = (*allocate, *MPIRUN, *meeting(), *LANEWISE, "train", write_config(tmp_path))
        done = cluster.run(*line).require_success()
    assert "4 processes on cpu" in done.stderr
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == on_one_process
