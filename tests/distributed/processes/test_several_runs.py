"""Several runs of one program, as for cross-validation, are the same on any number of processes."""

import hashlib
from pathlib import Path

import pytest

from tests.script import run_script
from tests.slow import slow

PROGRAM = Path(__file__).parents[1].joinpath("several_runs.py")


def models(folder: Path, **options: object) -> dict[str, str]:
    folder.mkdir()
    run_script(PROGRAM, cwd=folder, **options)
    files = sorted(folder.glob("runs/*/model.safetensors"))
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize(("num_processes", "has_agent"), [(2, False), *slow((3, False)), *slow((2, True))])
def test_each_run_of_a_program_begins_anew(tmp_path, num_processes, has_agent):
    """The second found its address in use where rank 0 keeps the store; and with a store of torchrun it got
    the folder of the first, as if the program had been started again."""
    alone = models(tmp_path / "alone")
    assert alone.keys() == {"1", "2", "3", "loop"}
    assert alone["loop"] == alone["1"]  # the same model, by a loop of its own
    assert len(set(alone.values())) == 3
    together = models(tmp_path / "together", num_processes=num_processes, has_agent=has_agent)
    assert together == alone
