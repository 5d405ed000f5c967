"""What the docs have of the code is what their scripts print: the keys, and the picture of the schedules."""

from pathlib import Path

import pytest

from tests.script import run_script

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "script"),
    [("configuration.md", "write_configuration.py"), ("_static/schedules.svg", "write_schedules.py")],
)
def test_a_file_is_what_its_script_prints(tmp_path, name, script):
    assert (DOCS / name).read_text() == run_script(DOCS / script, cwd=tmp_path), f"run docs/{script}"
