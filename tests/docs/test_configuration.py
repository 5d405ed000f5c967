"""docs/configuration.md says what the dataclasses say."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_its_script_prints():
    printed = subprocess.check_output([sys.executable, DOCS / "write_configuration.py"], text=True)
    assert (DOCS / "configuration.md").read_text() == printed, "run docs/write_configuration.py"
