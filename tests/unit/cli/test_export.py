"""Exporting what holds no model, or to where nothing can be written, is one clear error."""

import pytest
import torch
from safetensors.torch import load_file

from lanewise.cli.main import main
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.model_file import save_tensors
from lanewise.runs.checkpoint.saver import Saver


def test_what_is_no_run_is_named(tmp_path, capsys):
    for name, said in (
        ("nowhere", f"there is no {tmp_path / 'nowhere'}. "),
        ("", "is no run and no checkpoint"),
    ):
        assert main(["export", str(tmp_path / name), "--output", "model.safetensors"]) == 2
        assert said in capsys.readouterr().err


def test_a_part_of_a_model_has_its_own_names(tmp_path, capsys):
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    saver = Saver(folder, LocalWorld(torch.device("cpu")), keep_last=1, keep_best=0, sign=1)
    weights = {
        "teacher.0.weight": torch.ones(2),
        "teachers.weight": torch.zeros(2),
        "student.weight": torch.zeros(1),
    }
    saver.save({"model": weights}, Manifest(1, None, {}, ()))
    assert saver.finish()
    output = tmp_path / "teacher.safetensors"
    assert main(["export", str(tmp_path / "run"), "--output", str(output), "--module", "teacher"]) == 0
    assert {name: value.tolist() for name, value in load_file(output).items()} == {"0.weight": [1, 1]}
    assert main(["export", str(tmp_path / "run"), "--output", str(output), "--module", "teach"]) == 2
    assert "whose parts are student, teacher, teachers. Name one." in capsys.readouterr().err


def test_a_part_of_a_file_of_weights_is_written_likewise(tmp_path, capsys):
    """The model.safetensors that a run leaves was refused, as no run and no checkpoint."""
    given, output = tmp_path / "model.safetensors", tmp_path / "teacher.safetensors"
    save_tensors({"teacher.weight": torch.ones(2), "student.weight": torch.zeros(1)}, given)
    assert main(["export", str(given), "--output", str(output), "--module", "teacher"]) == 0
    assert {name: value.tolist() for name, value in load_file(output).items()} == {"weight": [1, 1]}
    assert capsys.readouterr().out == f"weights: {given}, written to {output}\n"
    assert main(["export", str(given), "--output", str(output), "--weights", "best"]) == 2
    assert f"--weights is one of a run's: got the file {given}. Leave it out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "output", "code", "said"),
    [
        ("net", "model.safetensors", 2, "has no state called model"),
        (
            "model",
            "nowhere/model.safetensors",
            1,
            "nowhere/model.safetensors cannot be written: No such file",
        ),
        ("model", "taken.safetensors", 1, "taken.safetensors cannot be written: Is a directory"),
        ("model", "model.onnx", 2, "--output must end in .safetensors"),
    ],
)
def test_what_cannot_be_exported_is_one_error(tmp_path, capsys, key, output, code, said):
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    saver = Saver(folder, LocalWorld(torch.device("cpu")), keep_last=1, keep_best=0, sign=1)
    saver.save({key: {"weight": torch.ones(2)}}, Manifest(1, None, {}, ()))
    assert saver.finish()
    (tmp_path / "taken.safetensors").mkdir()
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / output)]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_the_best_are_exported_where_the_run_keeps_them(tmp_path, capsys):
    """The newest checkpoint's were written, though `best.safetensors` lay beside it."""
    run, output = tmp_path / "run", tmp_path / "out.safetensors"
    folder = CheckpointFolder(run / "checkpoints")
    saver = Saver(folder, LocalWorld(torch.device("cpu")), keep_last=1, keep_best=0, sign=1)
    average = {"n_averaged": torch.tensor(4), "module.weight": torch.full((2,), 3.0)}
    saver.save({"model": {"weight": torch.ones(2)}, "average": average}, Manifest(4, None, {}, ()))
    assert saver.finish()

    def exported(*options: str) -> tuple[list[float], str]:
        assert main(["export", str(run), "--output", str(output), *options]) == 0
        return load_file(output)["weight"].tolist(), capsys.readouterr().out

    last = (
        [3, 3],
        f"weights: last, of step 4, written to {output}\n",
    )  # the average, as an evaluation takes it
    assert exported() == last
    save_tensors({"weight": torch.full((2,), 2.0)}, run / "best.safetensors")
    assert exported() == exported("--weights", "best") == ([2, 2], f"weights: best, written to {output}\n")
    assert exported("--weights", "last") == last
