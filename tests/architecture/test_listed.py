"""What stands in two places stands in both: a new case that is added to one of them is an error here."""

import ast
import inspect
from pathlib import Path
from typing import get_args

import pytest

import lanewise
from lanewise import data, errors
from lanewise.cli import main
from lanewise.commands.jobs import launchers
from lanewise.config import REDUCERS, PrecisionName
from lanewise.config.launchers import LauncherName
from lanewise.engine.precision import precision
from lanewise.engine.step import build as step_build
from lanewise.processes.device import peak
from lanewise.reduce import build as reduce_build

FOLDER = Path(lanewise.__file__).parent / "data"


def classes() -> dict[str, str]:
    """The formats of files, by the class: each is in the file of the data that it reads."""
    return {
        node.name: f"lanewise.data.{file.stem}"
        for file in FOLDER.glob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Dataset") and node.name != "FileDataset"
    }


def test_a_format_of_files_is_listed():
    assert classes().items() <= data._MODULES.items()


def test_type_checkers_see_what_is_imported_late():
    """Else an editor knows no such name, or python does not."""
    (block,) = [
        node
        for node in ast.parse((FOLDER / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {name.name: node.module for node in imports for name in node.names} == data._MODULES


def test_every_launcher_can_be_chosen():
    assert launchers._LAUNCHERS.keys() == set(get_args(LauncherName))


def test_every_exit_code_is_explained_by_the_help():
    codes = {
        error.exit_code
        for error in vars(errors).values()
        if inspect.isclass(error) and "exit_code" in dir(error)
    }
    for code in codes:
        assert f" {code} " in main._HELP.replace("\n", " "), code


def test_every_precision_has_a_format_and_a_peak():
    names = set(get_args(PrecisionName))
    assert precision._AUTOCAST.keys() == names
    assert set().union(*peak._TFLOPS.values()) == names


def test_every_look_is_taken():
    guard = Path(step_build.__file__).parent / "guard"
    looks = {
        node.name
        for file in guard.glob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and "Look" in map(ast.unparse, node.bases)
    }
    called = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(inspect.getsource(step_build.build_pass)))
        if isinstance(node, ast.Call)
    }
    assert looks <= called


@pytest.mark.parametrize("name", REDUCERS)
def test_every_reducer_is_built_by_its_name(name):
    assert f'"{name}"' in inspect.getsource(reduce_build.build_reducer)
