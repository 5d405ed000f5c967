"""Each file is one tree or one mistake, at once, whatever is in it."""

import os

import pytest

from lanewise.config.file import read_file
from lanewise.config.tree import MOST_CHARACTERS
from lanewise.errors import ConfigError

DIGITS = "9" * 5000


def mistakes_of(path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    return tuple(mistake.removeprefix(str(path)).strip(", ") for mistake in caught.value.mistakes)


@pytest.mark.parametrize(
    ("ending", "text", "mistake"),
    [
        (".json", f'{{"a": {DIGITS}}}', "holds an integer of more than 100 digits."),
        (".toml", f"a = {DIGITS}", "holds an integer of more than 100 digits."),
        (".toml", f"a = 0x{DIGITS}", "holds an integer of more than 100 digits."),
        (".yaml", f"a: {DIGITS}", "holds an integer of more than 100 digits."),
        (".yaml", f"a: 0x{DIGITS}", "holds an integer of more than 100 digits."),
        (".json", '{"a":' * 100_000, "is nested more than 64 levels deep."),
        (".json", '{"a":' * 70 + "1" + "}" * 70, "is nested more than 64 levels deep."),
        (".toml", "a = " + "[" * 100_000, "is nested more than 64 levels deep."),
        (".toml", "a." * 100_000 + "a = 1", "is nested more than 64 levels deep."),
        (".toml", "[" + "'a' . " * 100 + "a]", "is nested more than 64 levels deep."),
        (".yaml", "a: " + "[" * 100_000, "is nested more than 64 levels deep."),
        (".yaml", "a:\n" + "- " * 100_000, "is nested more than 64 levels deep."),
        (".json", '{"a": [' + "1," * 100_000 + "1]}", "holds more than 100,000 values."),
        (".yaml", "a: [" + "1," * 200_000 + "1]", "holds more than 100,000 values."),
        (".toml", "a = 2024-01-31", "holds 2024-01-31, a date;"),
        (".json", '{"a": "\\udc00"}', "holds text that is not Unicode"),
        (".yaml", "#" * (MOST_CHARACTERS + 1), "is longer than 1,048,576 characters."),
    ],
)
def test_too_much_of_anything_is_one_mistake(tmp_path, ending, text, mistake):
    path = tmp_path / f"run{ending}"
    path.write_text(text)
    (found,) = mistakes_of(path)
    assert found.startswith(mistake)


def test_a_key_that_is_repeated_a_hundred_thousand_times(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("{" + '"a":1,' * 100_000 + '"b":1}')
    assert len(mistakes_of(path)) == 99_999


def test_long_numbers_and_dots_that_are_meant(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("a = [" + "0.5, " * 200 + "]\nb = '" + "." * 500 + "'\nc.d.e = 1" + "0" * 98)
    assert read_file(path) == {"a": [0.5] * 200, "b": "." * 500, "c": {"d": {"e": 10**98}}}


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    """To open a pipe waits for somebody who writes; to read a device may never end."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "device.yaml"):
        (mistake,) = mistakes_of(tmp_path / name)
        assert mistake == "cannot be read: it is not a regular file. Name a text file in UTF-8."
