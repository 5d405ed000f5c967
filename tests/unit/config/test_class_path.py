"""A class_path becomes a class, or a mistake that says why it cannot."""

import sys

import pytest

from lanewise.config import ClassConfig
from lanewise.config.class_path import add_search_path, resolve_class
from lanewise.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that modules are imported from."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def mistake_of(class_path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_class("task", ClassConfig(class_path=class_path))
    (mistake,) = caught.value.mistakes
    assert "\n" not in mistake
    return mistake


def test_a_class_of_a_nested_module():
    config = ClassConfig(class_path="collections.abc.Mapping")
    assert resolve_class("task", config).__name__ == "Mapping"


def test_the_search_path_comes_first_and_once(folder):
    first, second = folder / "first", folder / "second"
    for place in (first, second):
        place.mkdir()
        (place / "a_task_of_mine.py").write_text(f"class Task: place = {place.name!r}")
    sys.path.append(str(second))
    add_search_path(str(first))
    add_search_path(str(second))
    add_search_path(str(second))
    assert sys.path[:2] == [str(second), str(first)]
    assert resolve_class("task", ClassConfig(class_path="a_task_of_mine.Task")).place == "second"


def test_without_a_search_path_nothing_is_added(folder):
    before = list(sys.path)
    add_search_path(None)
    assert sys.path == before


@pytest.mark.parametrize("class_path", ["Mnist", "", "my project.Mnist", "a..B", ".Mnist", "mnist.py:Mnist"])
def test_what_is_no_dotted_path(class_path):
    assert mistake_of(class_path).startswith("task.class_path must name a class as module.Class: got ")


def test_a_missing_module_suggests_its_neighbour(folder):
    (folder / "a_task_of_mine.py").touch()
    assert mistake_of("a_tsk_of_mine.Task") == (
        "task.class_path: there is no module a_tsk_of_mine. Did you mean a_task_of_mine?"
    )
    assert mistake_of("json.decodr.Task") == (
        "task.class_path: there is no module json.decodr. Did you mean json.decoder?"
    )


def test_a_missing_module_without_neighbours_says_where_to_put_it(folder):
    assert mistake_of("qqqqqqqq.Task") == (
        f"task.class_path: there is no module qqqqqqqq. Put its file into {folder}, or install its package."
    )


def test_a_missing_class_suggests_the_nearest_or_all(folder):
    (folder / "a_task_of_mine.py").write_text("class Mnist: pass\nclass _Hidden: pass\nnumber = 3")
    assert mistake_of("a_task_of_mine.Mnits") == (
        "task.class_path: module a_task_of_mine has no Mnits. Did you mean a_task_of_mine.Mnist?"
    )
    assert mistake_of("a_task_of_mine.Zzz").endswith("has no Zzz. Valid here: Mnist.")


def test_what_is_no_class():
    assert mistake_of("json.loads") == (
        "task.class_path must name a class: got json.loads, which is a function. Name a class."
    )


@pytest.mark.parametrize(
    ("text", "error", "line"),
    [
        ("x = 1\n\nx.y", "AttributeError: 'int' object has no attribute 'y'", 3),
        ("def f(:\n  pass", "SyntaxError: invalid syntax", 1),
        ("raise SystemExit('usage:\\n  train')", "SystemExit: usage: train", 1),
        ("import json\njson.loads('{')", "JSONDecodeError: ", None),
    ],
)
def test_a_module_that_fails_is_named_with_its_error_file_and_line(folder, text, error, line):
    path = folder / "a_task_of_mine.py"
    path.write_text(text)
    mistake = mistake_of("a_task_of_mine.Task")
    assert mistake.startswith(f"task.class_path: importing a_task_of_mine failed with {error}")
    if line is not None:
        assert mistake.endswith(f", at {path}, line {line}. Correct that line.")


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("qqqqqqqq", "Install it: pip install qqqqqqqq"),
        ("features_of_min", "Did you mean features_of_mine?"),
        ("json.loads", "Correct that line."),
    ],
)
def test_a_package_that_is_missing_is_to_be_installed(folder, missing, remedy):
    """It was once: correct that line."""
    (folder / "features_of_mine.py").touch()
    path = folder / "a_task_of_mine.py"
    path.write_text(f"import {missing}")
    said = f"failed with ModuleNotFoundError: No module named '{missing}'"
    assert mistake_of("a_task_of_mine.Task").startswith(f"task.class_path: importing a_task_of_mine {said}")
    assert mistake_of("a_task_of_mine.Task").endswith(f", at {path}, line 1. {remedy}")


def test_no_module_of_python_is_suggested():
    """It once said nis, which some Pythons have, where a project's mnist was gone."""
    assert "Did you mean" not in mistake_of("telnetlb.Task")
    assert "Did you mean" not in mistake_of("colorsy.Task")


def test_a_mistake_inside_a_package_is_placed_where_the_user_called_it(tmp_path, monkeypatch):
    """It once named a line of torch and said: correct that line."""
    (tmp_path / "wide_layer.py").write_text("import json\n\nLAYER = json.loads('{')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"wide_layer\.py, line 3"):
        resolve_class("task", ClassConfig(class_path="wide_layer.Task"))


def test_a_program_is_not_run_to_look_for_a_class_in_it(folder):
    (folder / "a_program").mkdir()
    (folder / "a_program" / "__main__.py").write_text("raise SystemExit(0)")
    said = "task.class_path: a_program.__main__ is a program."
    assert mistake_of("a_program.__main__.Task").startswith(said)
