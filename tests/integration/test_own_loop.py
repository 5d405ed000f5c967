"""Programs with a loop of their own, from their start to their end."""

from pathlib import Path

import pytest

from lanewise.runs.checkpoint.folder import CheckpointFolder
from tests.integration.command import TORCHRUN, run
from tests.script import run_in_forks

SAVES = Path(__file__).parent / "programs" / "own_loop_saves.py"


def program(*arguments: object) -> str:
    given = [str(argument) for argument in arguments]
    return f"sys.argv[1:] = {given}\nrunpy.run_path({str(SAVES)!r}, run_name='__main__')"


def test_a_loop_may_end_right_after_a_save_and_one_that_fails_is_an_error_of_the_program(tmp_path):
    """The thread that writes was cut off by the end of the interpreter, which aborted every other run."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    done = run_in_forks(program(good), program(bad, "fails"))
    assert done.stdout.split() == ["0", "1"], done.stderr
    (path,) = CheckpointFolder(good).all()
    assert path.name.endswith("1")
    assert "the checkpoint of step 1 could not be written" in done.stderr
    assert CheckpointFolder(bad).all() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "fails"])
def test_so_it_is_on_two_processes(tmp_path, how):
    done = run(*TORCHRUN, 2, SAVES, tmp_path / "run", how)
    assert done.code == (1 if how else 0), done.stderr
    assert len(CheckpointFolder(tmp_path / "run").all()) == (0 if how else 1)
    assert ("the checkpoint of step 1 could not be written" in done.stderr) == bool(how)
