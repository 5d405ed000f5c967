"""The site of the docs builds without a warning, and the Markdown stays readable where it lies."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)


def build(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    options = ("-W", "--keep-going", "-q", "-E", "-b", "html", "-d", folder / "doctrees")
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *options, source, folder / "html"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_every_page_is_built_without_a_warning(tmp_path):
    done = build(DOCS, tmp_path)
    # Metrics import matplotlib, which says so when it lists the fonts for the first time.
    said = [line for line in done.stderr.splitlines() if line and "matplotlib.font_manager" not in line]
    assert (done.returncode, said) == (0, [])
    built = {path.relative_to(tmp_path / "html") for path in tmp_path.rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix(".html") for page in PAGES} <= built


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((DOCS / "conf.py").read_text().replace('["_static"]', "[]"))
    (source / "index.md").write_text("# Page\n\n[nowhere](nowhere.md)\n")
    done = build(source, tmp_path)
    assert done.returncode
    assert "nowhere" in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_ascii_and_its_links_lead_to_files_without_a_site_too(page):
    text = page.read_text(encoding="utf-8")
    assert text.isascii()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_each_link_to_a_heading_leads_to_one(page):
    for target in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        if "://" not in target:
            assert heading in anchors(page.parent / path if path else page), target


def test_each_page_that_moved_leads_to_one_that_is_there():
    moved = runpy.run_path(str(DOCS / "conf.py"))["MOVED"]
    for old, new in moved.items():
        assert not (DOCS / f"{old}.md").exists(), old
        assert (DOCS / f"{new}.md").exists(), new


def test_the_manual_stays_one_that_can_be_read():
    pages = [page for page in PAGES if page.parent.name != "decisions"]
    assert len(pages) <= 31
    assert sum(len(page.read_text().split()) for page in pages) <= 50_500
    for page in (DOCS / "decisions").glob("0*.md"):
        assert len(page.read_text().splitlines()) <= 60, page
