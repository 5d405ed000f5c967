"""The README is short and its links lead somewhere; test_commands.py runs its example."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_links_lead_to_files_and_headings():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE) if heading else []
        names = [re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings]
        assert not heading or heading in names, target


def test_it_is_short():
    assert len(README.splitlines()) <= 120
