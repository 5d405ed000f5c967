"""No room of src grows unseen: lines.json beside this file holds the lines of code of each.

Who changes the number of a room writes the new one in the same commit; if it is larger, the commit's message
says what the lines are for. Blank lines, comments and docstrings are free.
"""

import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "lanewise"
TABLE = Path(__file__).with_name("lines.json")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""The tokens that are no code."""


def lines_of_code(source: str) -> int:
    """Count the lines that have code."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            code -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(code)


def room_of(path: Path) -> str:
    """A folder of src/lanewise or of a folder there, with all below it; `.` has the modules on top."""
    return "/".join(path.relative_to(SRC).parent.parts[:2]) or "."


def test_the_table_has_the_lines_of_each_room() -> None:
    counted: Counter[str] = Counter()
    for path in SRC.rglob("*.py"):
        counted[room_of(path)] += lines_of_code(path.read_text(encoding="utf-8"))
    written: dict[str, int] = json.loads(TABLE.read_text(encoding="utf-8"))
    rooms = sorted({room for room in counted | written if counted[room] != written.get(room, 0)})
    lines = "\n".join(f'  "{room}": {counted[room]},' for room in rooms)
    assert not rooms, f"write in {TABLE}, and say in the commit what more lines are for:\n{lines}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Text.\n\nMore.\n"""\n\nx = 1  # a remark\n# another\n', 1),
        ('def f():\n    """Text."""\n    return (\n        1,\n    )\n', 4),
        ('x = 1\n"""Of x."""\ny = """two\nlines"""\n', 3),
        ("def f(): ...\n", 1),
    ],
)
def test_the_count(source: str, expected: int) -> None:
    assert lines_of_code(source) == expected
