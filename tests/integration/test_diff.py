"""`lanewise diff` as it is run: each run with sources of its own, in processes of its own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import lanewise, train, write_config

SOURCE = (Path(__file__).parent / "tasks.py").read_text()
EDITED = SOURCE.replace("F.mse_loss(outputs, batch[1])", "F.l1_loss(outputs, batch[1])")
DIGESTS = {"digest_every_steps": 2}


def train_with(text: str, code: Path, run_dir: Path) -> None:
    code.mkdir(exist_ok=True)
    (code / "mine.py").write_text(text)
    given = {"search_path": str(code), "integrity": DIGESTS, "train": {"epochs": 2, "run_dir": str(run_dir)}}
    train(write_config(code, "mine.Line", **given)).require_success()


def cause_in(file: Path) -> Mapping[str, Any]:
    (cause,) = json.loads(file.read_text())["causes"]
    return cause


@pytest.mark.slow
def test_modules_of_one_name_are_those_of_each_run(tmp_path):
    """The second run has its module in another folder, where the loss was edited."""
    runs = tmp_path / "first", tmp_path / "second"
    train_with(SOURCE, tmp_path / "a", runs[0])
    train_with(EDITED, tmp_path / "b", runs[1])
    done = lanewise("diff", *runs, "--trust", "--json", tmp_path / "found")
    assert done.code == 1, done.stderr
    assert "sources.mine" in done.stdout
    cause = cause_in(tmp_path / "found")
    assert (cause["kind"], cause["step"], cause["lane"]) == ("operators", 1, 0)
    assert "aten.mse_loss.default in the model, mine.py" in cause["text"]


@pytest.mark.slow
def test_sources_that_were_edited_in_their_place_are_named_as_what_a_record_differs_by(tmp_path):
    """The present ones run, which do not give what the first run wrote."""
    runs = tmp_path / "first", tmp_path / "second"
    train_with(SOURCE, tmp_path / "a", runs[0])
    train_with(EDITED, tmp_path / "a", runs[1])
    named = "--search_path", tmp_path / "a"
    assert lanewise("diff", *runs, *named, "--json", tmp_path / "found").code == 1
    cause = cause_in(tmp_path / "found")
    assert cause["kind"] == "record"
    assert cause["text"].endswith("modules are not those of the run: mine (started at step 1)")
