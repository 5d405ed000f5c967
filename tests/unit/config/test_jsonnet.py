"""A Jsonnet program runs beside this process, and ends in time."""

import pytest

from lanewise.config import jsonnet
from lanewise.config.jsonnet import evaluate_jsonnet
from lanewise.errors import ConfigError

pytest.importorskip("_jsonnet")


def mistake_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        evaluate_jsonnet(text, "run.jsonnet")
    (mistake,) = caught.value.mistakes
    return mistake


def test_a_program_becomes_json():
    assert evaluate_jsonnet("{a: 1 + 1, b: '\u00e4'}", "run.jsonnet").split() == [
        "{",
        '"a":',
        "2,",
        '"b":',
        '"\u00e4"',
        "}",
    ]


def test_a_program_that_never_ends_is_a_mistake(monkeypatch):
    monkeypatch.setattr(jsonnet, "_MAX_SECONDS", 0.5)
    mistake = mistake_of("local f(x) = f(x + 1) tailstrict; f(0)")
    assert mistake == "run.jsonnet was not evaluated within 0.5 s. Look for an endless recursion in it."


def test_a_program_that_takes_all_memory_is_a_mistake():
    assert "and 1024 MiB: signal 6 ended it. Make it smaller." in mistake_of("std.repeat('x', 10000000000)")


@pytest.mark.parametrize(
    ("text", "reason"), [("{a: \0}", "embedded null character"), ("error 'no'", "RUNTIME ERROR: no")]
)
def test_what_is_no_program(text, reason):
    assert mistake_of(text).startswith(f"run.jsonnet is not valid Jsonnet: {reason}")


def test_nothing_is_imported_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "_jsonnet.py").write_text("raise SystemExit('imported')")
    (tmp_path / "resource.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert evaluate_jsonnet("1", "run.jsonnet") == "1\n"
