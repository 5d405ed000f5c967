"""YAML without the traps of version 1.1, read and written."""

import datetime as dt
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lanewise.config.strict_yaml import read_yaml, write_yaml
from lanewise.errors import ConfigError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.text(alphabet="0123456789.:+-eExo_nultrfasyYNO~<=", max_size=8)
)
TREES = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=8), below, max_size=4),
    max_leaves=12,
)


def mistakes_of(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, source="run.yaml")
    return caught.value.mistakes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("-1.5e+2", -150.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("3", 3),
        ("-3", -3),
        ("010", 10),
        ("08", 8),
        ("0o14", 12),
        ("0x1F", 31),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-31", "2024-01-31"),
        ("0b1", "0b1"),
        ("e3", "e3"),
        ("1.2.3", "1.2.3"),
        ("<<", "<<"),
        ("=", "="),
        ("null", None),
        ("~", None),
        ("", None),
        ('"1e-3"', "1e-3"),
        ("a: {b: [1, x]}", {"a": {"b": [1, "x"]}}),
        ("a: &a {b: 1}\nc: *a", {"a": {"b": 1}, "c": {"b": 1}}),
    ],
)
def test_scalars_as_yaml_1_2_reads_them(text, value):
    read = read_yaml(text, source="run.yaml")
    assert read == value
    assert type(read) is type(value)


def test_not_a_number():
    assert math.isnan(read_yaml(".nan", source="run.yaml"))


def test_a_repeated_key_names_both_lines():
    assert mistakes_of("a: 1\nb:\n  c: 2\n  d: 3\n  c: 4\na: 5\n") == (
        "run.yaml has the key a twice in one mapping: on lines 1 and 6. Remove one.",
        "run.yaml has the key c twice in one mapping: on lines 3 and 5. Remove one.",
    )


def test_a_key_may_stand_in_two_mappings():
    assert read_yaml("a: {c: 1}\nb: {c: 2}", source="run.yaml") == {"a": {"c": 1}, "b": {"c": 2}}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: [1, 2\n", "line 3"),
        ("a: 1\n  b: 2\n", "line 2"),
        ("a: !!python/object:os.system x", "line 1"),
    ],
)
def test_a_syntax_error_names_its_line(text, place):
    (mistake,) = mistakes_of(text)
    assert mistake.startswith(f"run.yaml, {place}, column ")
    assert "is not valid YAML" in mistake


@pytest.mark.parametrize(
    "value",
    ["!!float abc", "!!int 1.5", "!!bool maybe", "!!timestamp x", "!!binary x", "!!set {a}", "!x y", "! z"],
)
def test_a_tag_is_refused_whether_its_value_fits_or_not(value):
    (mistake,) = mistakes_of(f"a: 1\nb: {value}")
    assert mistake == (
        "run.yaml, line 2, column 4 is not valid YAML: a configuration has no tags. Write the value alone."
    )


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: [{c: *a}]}", "a: &a {*a : 1}"])
def test_an_alias_inside_of_what_it_names(text):
    (mistake,) = mistakes_of(text)
    assert "is not valid YAML: an alias stands inside of what it names." in mistake


def test_a_few_aliases_that_stand_for_too_many_values_are_refused():
    """Whoever went through them did not come back: only some callers counted."""
    lists = "".join(f"a{number + 1}: &a{number + 1} [{f'*a{number}, ' * 9}]\n" for number in range(8))
    (mistake,) = mistakes_of(f"a0: &a0 [1]\n{lists}")
    assert mistake.startswith("run.yaml holds more than 100,000 values.")


def test_a_number_of_thousands_of_digits_is_a_mistake_wherever_it_stands():
    """Python reads it in base 16, and then refuses to write it, which the mistake of a repeated key does."""
    (mistake,) = mistakes_of(f"? 0x{'1' * 6000}\n: 1\n" * 2)
    assert mistake.startswith("run.yaml holds an integer of more than 100 digits.")


def test_text_that_is_not_unicode_is_a_mistake():
    (mistake,) = mistakes_of("a: \udcff")
    assert "is not valid YAML: 'utf-8' codec can't encode" in mistake


def test_a_control_character_is_a_mistake():
    (mistake,) = mistakes_of("a: \x00")
    assert "\n" not in mistake
    assert "is not valid YAML" in mistake


@given(TREES)
def test_what_is_written_reads_back_equal(tree):
    read = read_yaml(write_yaml(tree), source="run.yaml")
    assert read == tree
    assert repr(read) == repr(tree)  # 1, 1.0 and True are equal, but not the same


@given(TREES)
def test_what_is_written_reads_the_same_in_yaml_1_1(tree):
    assert repr(yaml.safe_load(write_yaml(tree))) == repr(tree)


@pytest.mark.parametrize("text", ["1e-3", "0o14", "08", "yes", "1:30", "2024-01-31", "null", "", "<<", "--x"])
def test_text_that_looks_like_something_else_stays_text(text):
    written = write_yaml({"a": text})
    assert read_yaml(written, source="run.yaml") == {"a": text}
    assert yaml.safe_load(written) == {"a": text}


def test_the_order_of_keys_is_kept():
    assert write_yaml({"b": 1, "a": 2}) == "b: 1\na: 2\n"


def test_a_value_that_yaml_has_no_word_for():
    with pytest.raises(ConfigError, match="got a timedelta"):
        write_yaml({"a": dt.timedelta(1)})


@pytest.mark.parametrize("text", ["a: 1\n\tb: 2", "a:\n\tb: 2"])
def test_a_tab_before_a_key_is_named(text):
    with pytest.raises(ConfigError, match=r"line 2, column \d is not valid YAML: .*\. Indent by spaces"):
        read_yaml(text, "run.yaml")
