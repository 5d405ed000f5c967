"""Builds the site from the Markdown files of this folder: `make docs`."""

import importlib.metadata

project = "lanewise"
author = "The lanewise authors"
project_copyright = "The lanewise authors"
release = importlib.metadata.version("lanewise")

extensions = ["myst_parser", "sphinx_design"]
exclude_patterns = ["_build", "coming_from/code"]

# ::: instead of ``` where a block holds other blocks, and links to headings.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# A link that leads nowhere is an error: `make docs` builds with -W.
nitpicky = True

html_theme = "furo"
html_title = "lanewise"
html_static_path = ["_static"]
html_css_files = ["lanewise.css"]
html_copy_source = False
