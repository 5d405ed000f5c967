"""The manual is written in sentences that can be read once, in the words of the field."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    page
    for page in [*DOCS.glob("*.md"), *DOCS.glob("coming_from/*.md")]
    if page.name not in ("configuration.md", "benchmarks.md")  # written by programs
)
MOST_WORDS = 35
NOT_OF_THE_MANUAL = ("told", "upcoming", "stint", "stints", "tape")
"""Words of the code, for which the field has plainer ones."""


def paragraphs(page: str) -> list[str]:
    """Return the running text of a page: no code, tables, comments, headings or addresses."""
    page = re.sub(r"\A---\n.*?^---\n", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^ *(`{3,})[^\n]*\n.*?^ *\1 *$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"(?<=\n\n)(?: {4}[^\n]*\n+)+", "", page)
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"`[^`]*`", "code", page)
    page = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", page)
    blocks = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d\.) )", page)
    return [" ".join(block.split()) for block in blocks if not re.match(r" *(?:\||#|:::)", block)]


def sentences(page: str) -> list[str]:
    """Return the sentences of a page; what follows a colon is one of its own."""
    return [one for text in paragraphs(page) for one in re.split(r"(?<=[.?!:;])[*_)\"]*\s+", text) if one]


def long_ones(page: str) -> list[str]:
    return [one for one in sentences(page) if len(re.findall(r"[A-Za-z0-9][\w'.-]*", one)) > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_sentence_can_be_read_once(page):
    assert long_ones(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_words_of_the_code_alone_are_not_in_the_manual(page):
    words = set(re.findall(r"[a-z]+", " ".join(paragraphs(page.read_text())).lower()))
    assert words & set(NOT_OF_THE_MANUAL) == set()


def test_a_long_sentence_and_no_code_is_found():
    long = " ".join(["word"] * 36)
    page = f"# {long}\n\nShort. {long}.\n\n```\n{long}\n```\n\n    {long}\n\n| {long} |\n"
    assert long_ones(page) == [f"{long}."]
