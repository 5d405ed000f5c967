"""What the docs have of the code is what their scripts print: the keys, and the picture of the schedules."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "script"),
    [("configuration.md", "write_configuration.py"), ("_static/schedules.svg", "write_schedules.py")],
)
def test_a_file_is_what_its_script_prints(name, script):
    printed = subprocess.check_output([sys.executable, DOCS / script], text=True)
    assert (DOCS / name).read_text() == printed, f"run docs/{script}"
