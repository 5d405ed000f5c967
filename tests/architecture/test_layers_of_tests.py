"""The layers of tests by what they cost, as CONTRIBUTING.md has them: the dearest one is kept small."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
STARTERS = {"Cold", "BIN", "TORCHRUN", "LANEWISE"}
"""Names of tests/integration/command.py with which a program starts that forks no server of the tests."""
LIGHT = {
    "unit/launch/test_scratch.py",
    "unit/processes/test_die_with_parent.py",
    "unit/processes/watch/test_process.py",
    "unit/runs/test_dir.py",
}
"""Files of which no interpreter imports torch, so that one takes less than 0.1 s."""
MOST_COLD = 28
"""Fewer is better: one that imports torch takes two seconds. Lower it with each that goes."""


def is_cold(function: ast.FunctionDef, imported: set[str]) -> bool:
    """Tell whether a function itself starts Python from nothing."""
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    commands = [
        node.args if isinstance(node, ast.Call) else node.elts
        for node in ast.walk(function)
        if isinstance(node, ast.List | ast.Tuple | ast.Call)
    ]
    starts = any(ast.unparse(part) == "sys.executable" for command in commands for part in command)
    return bool(names & STARTERS & imported) or starts


def is_slow(function: ast.FunctionDef) -> bool:
    """Tell whether `make test` leaves all cases of a test out."""
    marks = [ast.unparse(one).removeprefix("pytest.") for one in function.decorator_list]
    return any(mark == "mark.slow" or ("parametrize" in mark and ", slow(" in mark) for mark in marks)


def cold_tests() -> Iterator[str]:
    """Yield the tests of `make test` that start Python from nothing, by a function of their file at most."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if str(path.relative_to(TESTS)) in LIGHT:
            continue
        tree = ast.parse(path.read_text())
        if (
            "pytestmark" in path.read_text()
            and "mark.slow" in path.read_text().partition("pytestmark")[2][:80]
        ):
            continue
        imported = {
            name.asname or name.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        cold = {one.name for one in functions if is_cold(one, imported)}
        for one in functions:
            called = {node.id for node in ast.walk(one) if isinstance(node, ast.Name)}
            if one.name.startswith("test_") and not is_slow(one) and (one.name in cold or called & cold):
                yield f"{path.relative_to(TESTS)}::{one.name}"


def test_few_tests_start_an_interpreter_from_nothing():
    found = [*cold_tests()]
    assert len(found) <= MOST_COLD, "\n".join(found)
