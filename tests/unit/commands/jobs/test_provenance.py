"""What run.jsonl says of a start."""

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from lanewise.commands.jobs import provenance
from lanewise.commands.jobs.provenance import commit_of, describe_start, sources
from lanewise.engine.run.build import build_run
from lanewise.processes.device.determinism import exact_pins
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure

MODULES = {
    "own_task.py": "import own_model, json\nclass Mine:\n    def f(self): ...\n",
    "own_model.py": "x = 1\n",
    "not_imported.py": "x = 1\n",
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The class of a module of the user's, which imports another one."""
    for name, source in MODULES.items():
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("own_task").Mine


def digest(name: str) -> str:
    return hashlib.sha256(MODULES[name].encode()).hexdigest()


def describe(world: World, first_step: int) -> dict:
    run = build_run(configure("tests.distributed.tasks.Language", num_lanes=2), world)
    return describe_start(run, first_step)


def test_what_is_known_of_a_start():
    start, other = run_distributed(describe, 2, 5)
    assert start == other
    assert json.loads(json.dumps(start)) == start
    assert start["first_step"] == 6
    assert start["world_size"] == 2
    assert start["hosts"] == {platform.node(): 2}
    assert start["devices"] == {"cpu": 2}
    assert start["versions"] == {
        "lanewise": importlib.metadata.version("lanewise"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        **exact_pins(torch.device("cpu")),
    }
    assert "tests.distributed.tasks" in start["sources"]
    assert start["config"]["batch"]["micro_batch_size"] == 2
    assert start["dataset"]["order"]["class_path"] == "lanewise.lanes.ShuffledOrder"
    assert start["config"]["checkpoint"]["keep_last"] == 2


def test_the_sources_are_the_modules_of_the_user_that_were_imported(own, tmp_path):
    found = {"own_task": digest("own_task.py"), "own_model": digest("own_model.py")}
    assert sources(own(), str(tmp_path)) == found
    assert sources(own(), None) == {"own_task": digest("own_task.py")}


def test_what_is_installed_is_no_source():
    assert sources(torch.nn.Linear(1, 1), sys.prefix) == {}


@pytest.mark.parametrize("has_file", [True, False])
def test_a_class_of_a_script_has_the_file_of_its_methods(tmp_path, has_file):
    source, names = MODULES["own_model.py"] + "class Mine:\n    def f(self): ...\n", {"__name__": "__main__"}
    if has_file:
        (tmp_path / "script.py").write_text(source)
    exec(compile(source, str(tmp_path / "script.py"), "exec"), names)
    expected = {"__main__": hashlib.sha256(source.encode()).hexdigest()} if has_file else {}
    assert sources(names["Mine"](), None) == expected


def git(folder, *given: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", "-C", folder, *name, *given], check=True, capture_output=True
    ).stdout.decode()


def test_a_start_notes_the_commit_of_its_modules_and_whether_they_are_as_it_has_them(own, tmp_path):
    """A file that is no module of the start changes nothing; one that was not added is not in the commit."""
    assert commit_of(own(), str(tmp_path)) is None  # no repository
    git(tmp_path, "init")
    git(tmp_path, "add", "own_task.py")
    git(tmp_path, "commit", "-m", "a")
    noted = {"commit": git(tmp_path, "rev-parse", "HEAD").strip()}
    assert commit_of(own(), str(tmp_path)) == noted | {"is_clean": False}
    git(tmp_path, "add", "own_model.py")
    git(tmp_path, "commit", "-m", "b")
    noted = {"commit": git(tmp_path, "rev-parse", "HEAD").strip()}
    (tmp_path / "not_imported.py").write_text("x = 2\n")
    assert commit_of(own(), str(tmp_path)) == noted | {"is_clean": True}
    (tmp_path / "own_model.py").write_text("x = 2\n")
    assert commit_of(own(), str(tmp_path)) == noted | {"is_clean": False}


def test_git_runs_no_program_that_a_repository_names_and_is_not_asked_in_a_folder_of_others(
    own, tmp_path, monkeypatch
):
    """The program that says which files have changed is run by git status where it is set."""
    git(tmp_path, "init")
    git(tmp_path, "add", "own_task.py", "own_model.py")
    git(tmp_path, "commit", "-m", "a")
    (tmp_path / "program").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    (tmp_path / "program").chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(tmp_path / "program"))
    assert commit_of(own(), str(tmp_path)) is not None
    assert not (tmp_path / "ran").exists()
    uid = os.getuid()
    monkeypatch.setattr(provenance.os, "getuid", lambda: uid + 1)
    assert commit_of(own(), str(tmp_path)) is None
