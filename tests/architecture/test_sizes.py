"""Bounds on every module: its length, the length of its functions, a docstring, ASCII only."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
MAX_MODULE_LINES = 350
MAX_FUNCTION_LINES = 100


def complaints(source: str) -> list[str]:
    """One line for each bound that a module's source breaks."""
    found: list[str] = []
    tree = ast.parse(source)
    if (num_lines := len(source.splitlines())) > MAX_MODULE_LINES:
        found.append(f"the module has {num_lines} lines, at most {MAX_MODULE_LINES} are allowed")
    if not ast.get_docstring(tree):
        found.append("the module has no docstring")
    for number, line in enumerate(source.splitlines(), start=1):
        if not line.isascii():
            found.append(f"line {number} is not ASCII")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES} are allowed")
    return found


def test_every_module_keeps_to_the_bounds() -> None:
    paths = sorted(SRC.rglob("*.py"))
    assert paths
    found = {str(path.relative_to(SRC)): complaints(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


BODY = "    x = 1\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""A."""\n' + "x = 1\n" * 349, []),
        ('"""A."""\n' + "x = 1\n" * 350, ["the module has 351 lines, at most 350 are allowed"]),
        ('"""A."""\ndef f():\n' + BODY * 99, []),
        ('"""A."""\ndef f():\n' + BODY * 100, ["f has 101 lines, at most 100 are allowed"]),
        ("x = 1\n", ["the module has no docstring"]),
        ("", ["the module has no docstring"]),
        ('"""A."""\nx = "\u00e4"\n', ["line 2 is not ASCII"]),
    ],
)
def test_the_bounds(source: str, expected: list[str]) -> None:
    assert complaints(source) == expected
