"""The table of a run's checkpoints says whatever is wrong with them."""

import pytest
import torch

from lanewise.cli.main import main
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.saver import Saver


@pytest.fixture
def run_dir(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    saver = Saver(folder, LocalWorld(torch.device("cpu")), keep_last=2, keep_best=0, sign=1)
    for step in (1, 2):
        saver.save({"model": {"weight": torch.ones(2)}}, Manifest(step, 0.5, {}, ()))
    assert saver.finish()
    return tmp_path


def test_good_ones_are_listed(run_dir, capsys):
    assert main(["checkpoints", str(run_dir)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "1", "2"]


@pytest.mark.parametrize(
    ("name", "expected"), [("[bold][]", "[bold][]"), ("a\udcffb", "a\\udcffb")], ids=["markup", "no text"]
)
def test_a_file_of_any_name_is_said(run_dir, name, expected, capsys):
    (run_dir / "checkpoints" / "step-000002" / name).touch()
    assert main(["checkpoints", str(run_dir)]) == 1
    shown = "".join(capsys.readouterr().out.split())
    assert shown.endswith(f"{expected}doesnotbelongtothecheckpoint.")


def test_a_folder_that_is_none_is_one_error(tmp_path, capsys):
    (tmp_path / "checkpoints").touch()
    assert main(["checkpoints", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path / 'checkpoints'} cannot be read: Not a directory."
