"""Writes programs into the pages of coming_from, which show them: `python docs/write_programs.py`.

A block of code that follows a link to a file has the file from the block's first line on.
"""

import re
from pathlib import Path

PAGES = Path(__file__).parent / "coming_from"
SHOWN = re.compile(r"(\]\(([\w./]+)\)\n\n```\w+\n)(.*?)(?=```)", re.DOTALL)


def write_programs(page: Path) -> str:
    """Return what a page says, with its programs as they are now."""

    def show(found: re.Match[str]) -> str:
        program = (page.parent / found[2]).read_text(encoding="utf-8")
        first_line = found[3].partition("\n")[0]
        assert f"\n{first_line}\n" in f"\n{program}", f"{found[2]} has no line {first_line!r}"
        return found[1] + program[f"\n{program}".index(f"\n{first_line}\n") :]

    return SHOWN.sub(show, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for path in PAGES.glob("*.md"):
        path.write_text(write_programs(path), encoding="utf-8")
