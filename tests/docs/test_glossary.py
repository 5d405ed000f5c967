"""The glossary and the code use the same words."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"

ONLY_IN_DOCS = {"node_rank"}
"""The code asks for the number of a machine under Slurm only."""


def words_of(page: str) -> list[str]:
    """Return the words that the tables define."""
    return re.findall(r"^\| \*\*(.+?)\*\* \|", page, flags=re.MULTILINE)


def plain(text: str) -> str:
    """Write a name or a text as lower-case words with one space between them."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", text)
    return " ".join(re.findall(r"[a-z0-9]+", spaced.lower()))


def texts_of(source: str) -> Iterable[str]:
    """Yield what a module names: its identifiers, attributes and keywords, and its docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def missing_words(page: str, sources: Iterable[str]) -> list[str]:
    """Return the words of a glossary that no source has, in whichever spelling and number."""
    code = "\n".join(plain(text) for source in sources for text in texts_of(source))
    return [word for word in words_of(page) if not re.search(rf"\b{plain(word)}(s|es)?\b", code)]


def test_the_code_has_every_word_of_the_glossary():
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert set(missing_words(GLOSSARY.read_text(), sources)) == ONLY_IN_DOCS


def test_no_word_is_defined_twice():
    words = words_of(GLOSSARY.read_text())
    assert 30 < len(words) <= 60
    assert len(words) == len(set(words))


def names_of(source: str) -> Iterable[str]:
    """Yield what a module itself names: its classes, functions and arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def test_the_code_has_no_word_that_is_not_used():
    _, _, table = GLOSSARY.read_text().partition("## Words that are not used")
    retired = re.findall(r"^\| (\w+) \|", table, flags=re.MULTILINE)
    assert len(retired) >= 3
    names = [name for path in (ROOT / "src").rglob("*.py") for name in names_of(path.read_text())]
    pattern = re.compile(rf"\b({'|'.join(retired)})(s|es)?\b")
    assert [name for name in names if pattern.search(plain(name))] == []


def test_no_two_classes_share_a_name():
    names = Counter(
        node.name
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("word", "source", "is_missing"),
    [
        ("lane", "def lanes(): ...", False),
        ("lane range", "class X:\n    lane_ranges = 1", False),
        ("run directory", "class RunDirectory: ...", False),
        ("num_lanes", "f(num_lanes=1)", False),
        ("micro-batch", '"""Reads a micro-batch."""', False),
        ("lane", "# lane", True),
        ("lane", "print('lane')", True),
        ("lane", "planes = 1", True),
        ("slot", "def lanes(): ...", True),
    ],
)
def test_a_word_is_found_in_names_and_docstrings(word, source, is_missing):
    assert missing_words(f"| **{word}** | meaning |", [source]) == [word] * is_missing
