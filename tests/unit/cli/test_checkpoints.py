"""The table of a run's checkpoints says whatever is wrong with them."""

from dataclasses import replace

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


def test_one_that_no_run_could_read_is_not_verified(run_dir, capsys):
    """Its files are as they were written, and a tensor is in two of them."""
    path = run_dir / "checkpoints" / "step-000002"
    manifest = Manifest.read(path)
    (part,) = (entry for entry in manifest.files if entry.name != "state.json")
    (path / "part-00001.safetensors").write_bytes((path / part.name).read_bytes())
    again = replace(part, name="part-00001.safetensors")
    replace(manifest, files=(*manifest.files, again)).write(path)
    assert main(["checkpoints", str(run_dir)]) == 1
    table = capsys.readouterr().out
    assert [line.split()[-1] for line in table.splitlines()[1:3]] == ["yes", "no"]
    assert "holds a tensor that another file holds too" in " ".join(table.split())


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
