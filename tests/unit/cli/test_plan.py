"""`lanewise plan`, in this process: its arguments, its exit code and its file."""

import json
import re
import sys
from pathlib import Path

import pytest

from lanewise.cli.main import main
from lanewise.config.load import dump_config
from tests.distributed.tasks import configure


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    run = configure("tests.distributed.tasks.Smooth", num_lanes=4, micro_batch_size=4, steps=1)
    file.write_text(dump_config(run), encoding="utf-8")
    return str(file)


def test_it_prints_the_table_and_writes_json(config, tmp_path, capsys):
    file = tmp_path / "plan.json"
    asked = ["plan", config, "--devices", "1,2", "--memory-gib", "1"]
    assert main([*asked, "--parts", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"2 devices, fsdp: activations .*; fits, ", printed)
    assert [line for line in printed.splitlines() if line.endswith(" ")] == []
    assert [row["num_devices"] for row in json.loads(file.read_text())["rows"]] == [1, 2, 2, 2, 2]


def test_the_table_is_followed_by_a_few_lines(config, capsys):
    """On 24 lines the parts of all rows once left nothing of the table."""
    assert main(["plan", config, "--devices", "1,2,4", "--memory-gib", "1e-9"]) == 1
    _, after = capsys.readouterr().out.rsplit("fsdp  ", 1)
    assert "activations" not in after
    assert "\ntoo large: 1 device, single; 2 devices, data_parallel; " in after
    assert len(after.splitlines()) < 6


def test_a_report_that_cannot_be_written_is_one_error(config, tmp_path, capsys):
    file = tmp_path / "nowhere" / "plan.json"
    assert main(["plan", config, "--devices", "1", "--memory-gib", "1", "--json", str(file)]) == 1
    *_, said = capsys.readouterr().err.splitlines()
    assert said == f"error: {file} cannot be written: No such file or directory."


def test_the_exit_code_is_1_where_nothing_fits(config, capsys):
    assert main(["plan", config, "--devices", "1", "--memory-gib", "1e-9"]) == 1
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "--devices must list numbers from 1 on, such as 1,2,4: got '0'."),
        (["--memory-gib", "-1"], "--memory-gib must be a number greater than 0: got '-1'."),
        (
            ["--batch.micro_batch_size", "auto"],
            "Write the number that `lanewise plan CONFIG --largest-micro-batch` prints.",
        ),
        (
            ["--largest-micro-batch", "--parts", "--devices", "2"],
            "--largest-micro-batch prints no table: leave --devices, --parts out.",
        ),
        (["--batch.micro_batch_size", "3"], "batch.global_batch_size must be a multiple"),
    ],
)
def test_a_mistake_is_named(config, arguments, message, capsys):
    assert main(["plan", config, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_is_no_job_for_several_processes(config, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["plan", config]) == 2
    assert "run it without torchrun, srun or mpirun" in capsys.readouterr().err


def test_the_configuration_of_a_run_builds_no_object_that_no_type_asks_for(
    config, tmp_path, monkeypatch, capsys
):
    """It may be of a stranger's run; any other file is a configuration that the user has chosen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_task.py").write_text(
        "from tests.distributed.tasks import Smooth\n"
        "class Own(Smooth):\n    def __init__(self, note=None): super().__init__()\n"
    )
    program = {"class_path": "zipfile.ZipFile", "init_args": {"file": "ran", "mode": "w"}}
    named = ["--task", json.dumps({"class_path": "own_task.Own", "init_args": {"note": program}})]
    arguments = [*named, "--search_path", str(tmp_path), "--devices", "1"]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    of_run = Path(config).rename(run_dir / "config.yaml")
    assert main(["plan", str(of_run), *arguments]) == 0
    (tmp_path / "ran").unlink()
    (run_dir / "metrics.jsonl").touch()
    assert main(["plan", str(of_run), *arguments]) == 2
    assert "zipfile.ZipFile cannot be used. No type" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert main(["plan", str(of_run), *arguments, "--trust"]) == 0
    assert (tmp_path / "ran").exists()
