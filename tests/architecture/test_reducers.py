"""No module tells one reducer from another by its name, but for those that declare and build them.

What is known of a reducer is a field of `ReducerKind`, so that a new one is a line there. A name within a
longer text, such as the remedy of an error, is free.
"""

import ast
from pathlib import Path

import pytest

from lanewise.config import REDUCERS

SRC = Path(__file__).parents[2] / "src" / "lanewise"
ALLOWED = {
    "config/reducers.py": "what is known of each",
    "hugging_face/arguments.py": "an argument of transformers has this name",
    "reduce/build.py": "builds each by its name",
}
"""Of each module: why."""


def names_in(source: str) -> set[str]:
    """The texts of a module that are the name of a reducer, and nothing else."""
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value in REDUCERS
    }


def test_reducers_are_named_where_they_are_declared_and_built_only() -> None:
    found = {
        str(path.relative_to(SRC)): names_in(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names and path not in ALLOWED} == {}
    assert all(found[path] for path in ALLOWED)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('if config.reducer == "fsdp":\n    pass\n', {"fsdp"}),
        ('if config.reducer not in ("ddp", "single"):\n    pass\n', {"ddp", "single"}),
        ("text = f\"{'ddp' if is_alone else name}\"\n", {"ddp"}),
        ('remedy = "Use distributed.reducer=ddp."\n', set()),
        ("from torch import fsdp\n", set()),
    ],
)
def test_the_finder(source: str, expected: set[str]) -> None:
    assert names_in(source) == expected
