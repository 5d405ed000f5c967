"""Builds the site from the Markdown files of this folder: `make docs`."""

import importlib.metadata
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
myst_heading_anchors = 4

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

MOVED = {
    "guide": "tutorial",
    "recipes": "task",
    "metrics": "evaluation",
    **dict.fromkeys(["callbacks", "tracking", "report"], "watching"),
    **dict.fromkeys(["batch_loss", "state"], "losses"),
    "streams": "data",
    "security": "launch",
    "checkpoints": "files",
    "plan": "memory",
    "bench": "performance",
    "programs": "verify",
    "devices": "reducers",
    "coming_from/one_device": "own_loop",
    "coming_from/articles": "coming_from/README",
    "coming_from/gradient_accumulation": "coming_from/larger_batches",
    **dict.fromkeys(
        [f"coming_from/{name}" for name in ("data_parallel", "spawn", "apex", "accelerate")],
        "coming_from/ddp",
    ),
}
"""Where the pages went that are no longer there."""


def setup(app: Any) -> None:
    """Leave a line in the place of each page that moved."""
    app.connect("build-finished", _leave_lines)
    app.connect(
        "autodoc-process-docstring", _mark_programs, priority=1
    )  # before sections such as Args are read


def _leave_lines(app: Any, error: Exception | None) -> None:
    if error or app.builder.name != "html":
        return
    for old, new in MOVED.items():
        to = f"{'../' * old.count('/')}{new}.html"
        line = f'<p>This page went to <a href="{to}">{new}</a>.</p>'
        page = (
            f'<!doctype html><title>lanewise</title><meta http-equiv="refresh" content="0; url={to}">{line}\n'
        )
        Path(app.outdir, f"{old}.html").write_text(page, encoding="utf-8")


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
