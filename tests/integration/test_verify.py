"""`lanewise verify` as a user runs it: real processes, the table, the exit code; and it leaves nothing."""

import json
import tempfile
from pathlib import Path

import pytest

from tests.integration.command import MNIST, lanewise


def verify(config, tmp_path, *arguments):
    """Run in an empty folder, with temporary files in another one."""
    # Python's sockets, which loader workers use, need short names.
    folders = [tmp_path / "here", Path(tempfile.mkdtemp(prefix="v"))]
    folders[0].mkdir()
    done = lanewise("verify", config, *arguments, cwd=folders[0], variables={"TMPDIR": str(folders[1])})
    assert done.leftover == []
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    folders[1].rmdir()
    return done


@pytest.mark.slow
def test_mnist_is_verified_and_nothing_is_left(tmp_path):
    report = tmp_path / "report.json"
    done = verify(MNIST, tmp_path, "--devices", "2", "--resume", "--json", report).require_success()
    rows = [line.split() for line in done.stdout.splitlines() if line.rstrip().endswith(" same")]
    assert len(rows) == 4  # one process again, two, and both of them resumed from the other
    assert all(row[-8:] == ["same"] * 8 for row in rows)
    assert "steps 1, 2, 63, 64, step 63 with 32 of 64 samples" in done.stdout
    assert "BatchNorm" in done.stdout
    assert done.stdout.splitlines()[-1] == ("verified: 1 process and 2 processes compute the same bytes")
    written = json.loads(report.read_text())
    assert written["verified"]
    assert [layout["num_processes"] for layout in written["layouts"]] == [1, 2, 1, 2]
    assert not (MNIST.parent / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "two"], "--devices must list numbers from 1 on, such as 1,2,4: got 'two'."),
        (["--devices", "9"], "every process needs at least one lane: got 9 processes for 4 lanes."),
        (["--steps"], "--steps needs a value."),
        (["--nonsense", "1"], "nonsense"),
        (["--device", "2"], "--device is not an option of verify. Did you mean --devices?"),
        (
            [
                *("--distributed.reducer", "fsdp", "--distributed.fsdp.param_dtype", "bf16"),
                *("--precision", "bf16", "--distributed.equality", "close"),
            ],
            "which has its weights in float32: got distributed.fsdp.param_dtype bf16.",
        ),
    ],
)
def test_bad_input_is_one_error(tmp_path, arguments, said):
    done = verify(MNIST, tmp_path, *arguments)
    assert done.code == 2
    assert len(done.errors) == 1
    assert said in done.errors[0]


def test_it_does_not_run_inside_a_world(tmp_path):
    done = lanewise(
        "verify",
        MNIST,
        variables={
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1234",
        },
    )
    assert done.code == 2
    assert "run it without torchrun, srun or mpirun" in done.errors[0]
