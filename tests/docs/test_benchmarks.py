"""The numbers of README and of the page of the benchmarks are those of results.md."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
specification = importlib.util.spec_from_file_location("write_benchmarks", DOCS / "write_benchmarks.py")
writer = importlib.util.module_from_spec(specification)
specification.loader.exec_module(writer)


@pytest.mark.parametrize("page", writer.PAGES, ids=lambda page: page.name)
def test_a_page_says_what_was_measured(page, tmp_path):
    """The page claimed a lead over Fabric that was not there."""
    text = page.read_text()
    assert writer.write_page(page) == text, "python docs/write_benchmarks.py writes it anew"
    first = re.search(r"\| (\d\.\d\d) \|", text)
    changed = tmp_path / page.name
    changed.write_text(f"{text[: first.start(1)]}0.50{text[first.end(1) :]}")
    assert writer.write_page(changed) == text


def test_where_lanewise_is_behind_is_said(monkeypatch):
    assert "slower than by Fabric and Ignite" in writer.steps() or ", commit " in writer.facts("tiny_step")
    monkeypatch.setattr(writer, "facts", lambda *_: "Medians of today, commit 1a2b3c4d, 2 cores.")
    times = {"lanewise": "1.75", "Ignite": "1.40", "Fabric": "1.57"}
    monkeypatch.setattr(writer, "step", lambda *step: times.get(step[-1], "1.90"))
    shown = writer.steps()
    assert "behind Ignite and Fabric (a model that costs almost nothing, 1 process)" in shown
    assert shown.endswith(writer.WHY)
    times["lanewise"] = "1.20"
    shown = writer.steps()
    assert "behind" not in shown
    assert writer.WHY not in shown
