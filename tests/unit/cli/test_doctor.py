"""`lanewise doctor`: what it refuses. What it finds is in tests/integration/test_doctor.py."""

import pytest

from lanewise.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.epochs", "2"], "--train.epochs is a key of a configuration. Name CONFIG first."),
        (["--expect-gbit", "0"], "--expect-gbit must be a number greater than 0: got '0'."),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_mistake_is_named(arguments, message, capsys):
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_it_is_no_job_for_several_processes(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    assert main(["doctor"]) == 2
    assert "doctor starts its own processes" in capsys.readouterr().err
