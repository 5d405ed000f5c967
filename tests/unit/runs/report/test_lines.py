"""Files of JSON lines, however damaged they are."""

import os

import pytest

from lanewise.runs.report.lines import JsonLinesReader


def read(path, **options):
    reader = JsonLinesReader(path, **options)
    return list(reader), reader.problems


def test_what_can_be_read_is_read_and_the_rest_is_said(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"a": 1}\nnonsense\n[1]\n\xff\n{"a": 2}\n{"a":')
    lines, problems = read(file)
    assert lines == [{"a": 1}, {"a": 2}]
    assert problems == [
        "metrics.jsonl: its last line is half-written",
        "metrics.jsonl: 3 lines cannot be read, the first of them line 2",
    ]


def test_the_end_of_a_file_begins_with_a_whole_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"a": {number}}}\n' for number in range(100)))
    reader = JsonLinesReader(file, last_bytes=35)
    assert list(reader) == [{"a": 97}, {"a": 98}, {"a": 99}]
    assert not reader.is_whole
    assert reader.problems == []


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "link"])
def test_what_is_no_file_is_said_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "run.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    lines, problems = read(path)
    assert lines == []
    (problem,) = problems
    assert "is not there" in problem if kind == "missing" else "cannot be read" in problem
