"""Warnings and first errors in the logs of ranks."""

from lanewise.runs.report.logs import read_logs

AT = "2026-11-25 03:34:26,415"


def test_warnings_are_counted_and_the_first_error_of_each_rank_is_kept(tmp_path):
    warning = f"{AT} WARNING py.warnings: careful\n"
    (tmp_path / "rank-00000.log").write_text(f"begin\n{warning}{AT} INFO a.b: fine\n{warning}")
    (tmp_path / "rank-00001.log").write_text(
        f"{warning}{AT} ERROR a.b: it broke\nTraceback\n  line\n{AT} ERROR a: later\n"
    )
    (tmp_path / "other.log").write_text(f"{AT} ERROR a: no rank's\n")
    found = read_logs(tmp_path)
    assert found.warnings == {"careful": 3}
    assert found.errors == {1: "it broke\nTraceback\n  line"}
    assert found.problems == []


def test_logs_that_are_not_there_or_no_files_are_said(tmp_path):
    assert read_logs(tmp_path / "logs").problems == ["logs is not there"]
    (tmp_path / "rank-00000.log").mkdir()
    assert "rank-00000.log cannot be read" in read_logs(tmp_path).problems[0]
