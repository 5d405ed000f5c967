"""The walk over a plain tree: every mistake, each on one line, with its key, its value and the remedy."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

import pytest

from lanewise.config.check import Section, above, at_least, below, read_section, show, suggest
from lanewise.errors import ConfigError


def _ends_before_it_starts(start: int, end: int) -> Iterator[str]:
    if end < start:
        yield f"end {end} is before start {start}"


class Inner(Section):
    start: Annotated[int, at_least(0)]
    end: Annotated[int, below(100)] = 9
    RULES: ClassVar = (_ends_before_it_starts,)


class Outer(Section):
    inner: Inner
    other: Inner | None = None
    rate: Annotated[float, above(0)] | None = None
    flag: bool = True
    name: str = "n"
    mode: Literal["fast", "slow"] = "fast"
    table: Mapping[str, Any] = field(default_factory=dict)


def mistakes_of(tree: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_section(Outer, tree)
    assert all("\n" not in mistake for mistake in caught.value.mistakes)
    return list(caught.value.mistakes)


def test_a_tree_becomes_the_dataclass():
    tree = {"inner": {"start": 0}, "rate": 1, "flag": False, "table": {"a": [1]}, "other": None}
    config = read_section(Outer, tree)
    assert config == Outer(inner=Inner(start=0, end=9), rate=1.0, flag=False, table={"a": [1]})
    assert type(config.rate) is float


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        ({"flags": 1}, "flags is not a key of the configuration. Did you mean flag?"),
        ({"start": 1}, "start is not a key of the configuration. Did you mean inner.start?"),
        (
            {"zzz": 1},
            "zzz is not a key of the configuration. Valid here: inner, other, rate, flag, name, mode, table.",
        ),
        (
            {7: 1},
            "7 is not a key of the configuration. Valid here: inner, other, rate, flag, name, mode, table.",
        ),
        ({"inner": {"start": 1, "ende": 2}}, "inner.ende is not a key of inner. Did you mean inner.end?"),
        ({"inner": {}}, "inner.start is missing: need a whole number at least 0. Add the key inner.start."),
        ({"inner": 3}, "inner must be a section with the keys start, end: got 3."),
        ({"inner": None}, "inner must be a section with the keys start, end: got null."),
        ({"other": {"start": -1}}, "other.start must be at least 0: got -1."),
        (
            {"inner": {"start": 1, "end": 100}},
            "inner.end must be less than 100: got 100.",
        ),
        ({"rate": 0}, "rate must be greater than 0: got 0.0."),
        (
            {"inner": {"start": "3"}},
            (
                'inner.start must be a whole number: got "3", which is text. '
                "Write a whole number, without quotes."
            ),
        ),
        ({"inner": {"start": True}}, "inner.start must be a whole number: got true. Write a whole number."),
        ({"inner": {"start": 3.0}}, "inner.start must be a whole number: got 3.0. Write 3."),
        ({"inner": {"start": 3.5}}, "inner.start must be a whole number: got 3.5. Write a whole number."),
        ({"rate": True}, "rate must be a number: got true. Write a number."),
        ({"flag": "no"}, 'flag must be true or false: got "no", which is text. Write false.'),
        ({"flag": 1}, "flag must be true or false: got 1. Write true or false."),
        ({"name": 3}, 'name must be text: got 3. Put it into quotes: "3".'),
        ({"name": None}, "name must be text: got null. Write text."),
        ({"mode": "slwo"}, 'mode must be one of fast, slow: got "slwo".'),
        ({"mode": "SLOW"}, 'mode must be one of fast, slow: got "SLOW". Did you mean slow?'),
        (
            {"inner": {"start": "three"}},
            'inner.start must be a whole number: got "three", which is text. Write a whole number.',
        ),
        ({"mode": 1}, "mode must be one of fast, slow: got 1. Write one of fast, slow."),
        (
            {"table": [1]},
            "table must be a mapping of names to values: got [1]. Write a mapping of names to values.",
        ),
        (
            {"table": {1: 2}},
            'table must be a mapping of names to values: got {"1": 2}. Write a mapping of names to values.',
        ),
        ({"inner": {"start": 5, "end": 4}}, "end 4 is before start 5"),
    ],
)
def test_one_mistake(changes, mistake):
    assert mistakes_of({"inner": {"start": 1}, **changes}) == [mistake]


def test_a_missing_section_names_its_keys():
    assert mistakes_of({}) == [
        "inner is missing: need a section with the keys start, end. Add the key inner."
    ]


def test_a_tree_that_is_no_mapping():
    (mistake,) = mistakes_of([1, 2])
    assert mistake.startswith("the configuration must be a section with the keys inner, ")


def test_all_mistakes_come_at_once_in_the_order_of_the_sections():
    mistakes = mistakes_of(
        {
            "flagg": 1,
            "inner": {"start": 5, "end": 4, "extra_key": 1},
            "other": {"start": "a", "end": 200},
            "mode": "medium",
        }
    )
    assert [mistake.split()[0] for mistake in mistakes] == [
        "flagg",
        "inner.extra_key",
        "end",
        "other.start",
        "other.end",
        "mode",
    ]


def test_a_rule_waits_until_its_fields_are_valid():
    (mistake,) = mistakes_of({"inner": {"start": "a", "end": 4}})
    assert mistake.startswith("inner.start must be a whole number")


def test_a_rule_sees_defaults():
    assert mistakes_of({"inner": {"start": 10}}) == ["end 9 is before start 10"]


def test_the_dotted_key_goes_on_from_where_the_tree_stands():
    with pytest.raises(ConfigError, match=r"^task\.start is missing"):
        read_section(Inner, {}, key="task")


def test_a_section_made_in_python_is_checked_too():
    with pytest.raises(ConfigError, match="end 1 is before start 2"):
        Inner(start=2, end=1)


class Lists(Section):
    parts: tuple[Inner, ...] = ()
    names: Annotated[int, at_least(1)] | tuple[str, ...] | None = None


def mistakes_of_lists(**tree: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_section(Lists, tree)
    return list(caught.value.mistakes)


def test_a_list_becomes_a_tuple_of_checked_items():
    config = read_section(Lists, {"parts": [{"start": 1}, {"start": 2, "end": 3}], "names": ["a", "b"]})
    assert config == Lists(parts=(Inner(start=1), Inner(start=2, end=3)), names=("a", "b"))
    assert read_section(Lists, {"parts": []}) == Lists()


@pytest.mark.parametrize("names", [None, 3])
def test_where_a_list_is_one_of_the_choices_the_others_hold_too(names):
    assert read_section(Lists, {"names": names}).names == names


def test_every_mistake_of_every_item_comes_with_its_number():
    items = [{"start": 1}, {"start": -1, "ende": 2}, {}, 3, {"start": 5, "end": 4}]
    assert mistakes_of_lists(parts=items) == [
        "parts.1.ende is not a key of parts.1. Did you mean parts.1.end?",
        "parts.1.start must be at least 0: got -1.",
        "parts.2.start is missing: need a whole number at least 0. Add the key parts.2.start.",
        "parts.3 must be a section with the keys start, end: got 3.",
        "end 4 is before start 5",
    ]


@pytest.mark.parametrize(
    ("value", "got"), [({"start": 1}, '{"start": 1}'), (None, "null"), (3, "3"), (True, "true")]
)
def test_what_is_no_list_is_one_mistake(value, got):
    (mistake,) = mistakes_of_lists(parts=value)
    needed = "a list, each item a section with the keys start, end"
    assert mistake == f"parts must be {needed}: got {got}. Write {needed}."


@pytest.mark.parametrize(
    ("names", "mistake"),
    [
        (0, "names must be at least 1: got 0."),
        (True, "names must be a whole number at least 1 or a list, each item text: got true."),
        (["a", 0], 'names.1 must be text: got 0. Put it into quotes: "0".'),
        ([["a"]], 'names.0 must be text: got ["a"]. Write text.'),
    ],
)
def test_a_mistake_is_told_for_the_choice_that_was_meant(names, mistake):
    assert mistakes_of_lists(names=names) == [mistake]


def test_suggest_names_the_nearest_or_all():
    assert suggest("optimiser", ["optimizer", "task"]) == "Did you mean optimizer?"
    assert suggest("lrr", ["lr"], prefix="optimizer.") == "Did you mean optimizer.lr?"
    assert suggest("x", ["optimizer", "task"]) == "Valid here: optimizer, task."
    assert suggest("x", []) == "Valid here: nothing."


def test_values_are_shown_as_in_a_file_and_shortened():
    assert show(None) == "null"
    assert show("a\nb") == '"a\\nb"'
    assert show({"a": [True]}) == '{"a": [true]}'
    assert show("x" * 500) == '"' + "x" * 76 + "..."
    assert show(object).startswith('"<class')
