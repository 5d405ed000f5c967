"""Builds the site from the Markdown files of this folder: `make docs`."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

project = "lanewise"
author = "The lanewise authors"
project_copyright = "The lanewise authors"
release = importlib.metadata.version("lanewise")

extensions = ["myst_parser", "sphinx_design", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "coming_from/code"]

# ::: instead of ``` where a block holds other blocks, and links to headings.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# A link that leads nowhere is an error: `make docs` builds with -W.
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages, in signatures of the API
autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "code"

html_theme = "furo"
html_title = "lanewise"
html_static_path = ["_static"]
html_css_files = ["lanewise.css"]
html_copy_source = False

_README = Path(__file__).parents[1] / "README.md"


def setup(app: Any) -> None:
    """Put the README before the table of contents of the first page."""
    app.connect("source-read", _add_readme)
    app.connect(
        "autodoc-process-docstring", _mark_programs, priority=1
    )  # before sections such as Args are read


def _add_readme(_app: Any, name: str, source: list[str]) -> None:
    if name != "index":
        return
    text = _README.read_text(encoding="utf-8").replace("](docs/", "](")
    # What is not on the site is named without a link.
    source[0] = re.sub(r"\[([^]]+)\]\((?:examples/|CHANGELOG|CONTRIBUTING)[^)]*\)", r"\1", text) + source[0]


def _mark_programs(
    _app: Any, _what: str, _name: str, _of: object, _options: object, lines: list[str]
) -> None:
    """Mark indented paragraphs of a docstring, which Sphinx takes for quotations, as programs."""
    marked: list[str] = []
    section = ""
    for number, line in enumerate(lines):
        if line and not line.startswith(" "):
            section = line
        if line.startswith("    ") and number and not lines[number - 1] and not section.endswith("s:"):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked
