"""The picture of the README is drawn from runs: lanewise has one line, DDP as it is usually written three."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.integration.command import Cold
from tests.patience import patient

DOCS = Path(__file__).parents[2] / "docs"


def check(picture):
    """Three lines on the left that differ, and three on the right that are one."""
    ET.fromstring(picture)
    lines = [points.split() for points in re.findall(r'<polyline points="([^"]+)"', picture)]
    heights = [[point.partition(",")[2] for point in line] for line in lines]
    assert [len(line) for line in heights] == 6 * [8]
    assert len({*map(tuple, heights[:3])}) == 3
    assert len({*map(tuple, heights[3:])}) == 1
    return picture


def test_the_picture_can_be_read_in_the_dark():
    picture = check((DOCS / "_static" / "losses.svg").read_text())
    assert "prefers-color-scheme: dark" in picture
    assert "docs/_static/losses.svg" in (DOCS.parent / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_give_such_a_picture(tmp_path):
    with Cold(sys.executable, DOCS / "write_losses.py", cwd=tmp_path) as command:
        command.patience_seconds = patient(500)
        check(command.finish().require_success().stdout)
