"""Programs with a loop of their own, from their start to their end."""

import sys
from pathlib import Path

import pytest

from lanewise.runs.checkpoint.folder import CheckpointFolder
from tests.integration.command import BIN, run
from tests.slow import slow

SAVES = Path(__file__).parent / "programs" / "own_loop_saves.py"
COMMANDS = {1: (sys.executable,), 2: (BIN / "torchrun", "--standalone", "--nproc-per-node", "2")}


@pytest.mark.parametrize("num_processes", [1, *slow(2)])
def test_a_loop_may_end_right_after_a_save(tmp_path, num_processes):
    """The thread that writes was cut off by the end of the interpreter, which aborted every other run."""
    done = run(*COMMANDS[num_processes], SAVES, tmp_path / "run")
    assert done.code == 0, done.stderr
    (path,) = CheckpointFolder(tmp_path / "run").all()
    assert path.name.endswith("1")


@pytest.mark.parametrize("num_processes", [1, *slow(2)])
def test_a_last_save_that_fails_is_an_error_of_the_program(tmp_path, num_processes):
    done = run(*COMMANDS[num_processes], SAVES, tmp_path / "run", "fails")
    assert done.code == 1
    assert "the checkpoint of step 1 could not be written" in done.stderr
    assert CheckpointFolder(tmp_path / "run").all() == []
