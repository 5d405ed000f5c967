"""Which modules of a replay are not those of the starts whose steps it takes."""

import hashlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest

from lanewise.commands.replay.sources import changed_sources

COMMIT = "1a2b3c4d5e6f7a8b9c0d" * 2


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A task of a module that was loaded by its file, which no name on the path leads to."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file.py").write_text("class Mine: ...\n")
    spec = importlib.util.spec_from_file_location("own_loaded", tmp_path / "deep" / "file.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_loaded", module)
    spec.loader.exec_module(module)
    extension = tmp_path / "own_extension.so"
    extension.write_text("binary")
    monkeypatch.setitem(sys.modules, "own_extension", SimpleNamespace(__file__=str(extension)))
    return module.Mine()


def changed(own, folder, *starts):
    config = SimpleNamespace(search_path=str(folder), task=SimpleNamespace(class_path="own_loaded.Mine"))
    return changed_sources(SimpleNamespace(config=config, starts=starts), own)


def start(first_step, *, task="class Mine: ...\n", extension="binary", **noted):
    return {
        "first_step": first_step,
        "sources": {"own_loaded": digest(task), "own_extension": digest(extension), "of_callback": "5a"},
        **noted,
    }


def test_modules_are_found_however_they_were_loaded(own, tmp_path):
    assert changed(own, tmp_path, start(1)) == []


def test_modules_that_differ_are_named_with_the_starts_and_the_commit_that_has_them(own, tmp_path):
    git = {"commit": COMMIT, "is_clean": True}
    starts = start(1, task="x = 1", git=git), start(5, task="x = 2", git=git), start(9, extension="other")
    assert changed(own, tmp_path, *starts) == [
        "modules are not those of the run: own_loaded; these are of commit 1a2b3c4d5e6f (started at step 1, 5)",  # noqa: E501
        "modules are not those of the run: own_extension (started at step 9)",
    ]


@pytest.mark.parametrize(
    ("git", "told"),
    [
        ({"commit": COMMIT, "is_clean": False}, "commit 1a2b3c4d5e6f, with changes that it does not have"),
        ({"commit": "$(touch ran)", "is_clean": True}, ""),
        ({}, ""),
    ],
)
def test_a_commit_is_named_as_far_as_it_is_one(own, tmp_path, git, told):
    (line,) = changed(own, tmp_path, start(1, task="x = 1", git=git))
    assert told in line
    assert "touch" not in line


def test_a_class_of_a_script_is_compared_by_the_name_of_its_file(own, tmp_path):
    """The start noted it as `__main__`, and a replay imports its module."""
    of_script = {"first_step": 1, "sources": {"__main__": digest("class Mine: ...\n")}}
    assert changed(own, tmp_path, of_script) == []
    of_script["sources"] = {"__main__": digest("x = 1")}
    assert "__main__" in changed(own, tmp_path, of_script)[0]
