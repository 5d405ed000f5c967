"""`lanewise bench`: what it refuses before it starts anything."""

import pytest

from lanewise.cli.main import main
from lanewise.config.load import dump_config
from tests.distributed.tasks import configure


@pytest.fixture
def config(tmp_path) -> str:
    file = tmp_path / "run.yaml"
    run = configure("tests.distributed.tasks.Smooth", num_lanes=4, micro_batch_size=4, steps=1)
    file.write_text(dump_config(run), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reducers", "dpp"], "--reducers must list reducers of ddp, fsdp, single, data_parallel"),
        (["--devices", "0"], "--devices must list numbers from 1 on"),
        (
            ["--reducers", "single", "--devices", "2"],
            "single is for one device, and the other reducers are for",
        ),
        (
            ["--json", "nowhere/bench.json"],
            "nowhere/bench.json cannot be written: there is no folder nowhere.",
        ),
        (["--seconds", "0"], "--seconds must be a number greater than 0: got '0'."),
        (["--evaluate", "1.5"], "--evaluate must be a number from 1 on: got '1.5'."),
        (["--distributed.launcher", "kubernetes"], "distributed.kubernetes.image"),
        (
            ["--batch.micro_batch_size", "auto"],
            "Write the number that `lanewise plan CONFIG --largest-micro-batch` prints.",
        ),
    ],
)
def test_bad_input_is_an_error_with_its_remedy(config, arguments, message, capsys):
    assert main(["bench", config, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_prepared_world_is_refused(config, capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main(["bench", config]) == 2
    assert "run it without torchrun, srun or mpirun" in " ".join(capsys.readouterr().err.split())
