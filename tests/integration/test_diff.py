"""`lanewise diff` as it is run: each run with sources of its own, in processes of its own."""

import json
from pathlib import Path

import pytest

from tests.integration.command import lanewise, train, write_config


@pytest.mark.slow
def test_modules_of_one_name_are_replayed_as_each_run_had_them(tmp_path):
    """Two folders have a module of the same name; in one of them the loss was edited."""
    source = (Path(__file__).parent / "tasks.py").read_text()
    edited = source.replace("F.mse_loss(outputs, batch[1])", "F.l1_loss(outputs, batch[1])")
    assert edited != source
    for name, text in (("a", source), ("b", edited)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
        config = write_config(
            tmp_path / name,
            "mine.Line",
            search_path=str(tmp_path / name),
            integrity={"digest_every_steps": 2},
        )
        train(config).require_success()
    result = tmp_path / "diff.json"
    done = lanewise("diff", tmp_path / "a" / "run", tmp_path / "b" / "run", "--json", result)
    assert done.code == 1, done.stderr
    assert "sources.mine" in done.stdout
    (cause,) = json.loads(result.read_text())["causes"]
    assert (cause["kind"], cause["step"], cause["lane"]) == ("operators", 1, 0)
    assert "aten.mse_loss.default in the model, mine.py" in cause["text"]
