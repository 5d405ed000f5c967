"""What a tree may hold, whichever format it comes from, is bounded in depth, number and kind."""

import datetime as dt
from collections import UserDict, UserList
from typing import Any

import pytest

from lanewise.config.tree import MOST_LEVELS, MOST_VALUES, check_tree, plain_tree
from lanewise.errors import ConfigError


def mistake_of(tree: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_tree(tree, "run.json")
    (mistake,) = caught.value.mistakes
    return mistake


def nested(levels: int) -> Any:
    tree: Any = 1
    for level in range(levels):
        tree = {"a": tree} if level % 2 else [tree]
    return tree


def test_what_a_configuration_holds():
    check_tree({"a": [None, True, 1, -2.5, "text", "\0", float("nan"), {}], 3: {"b": 10**99}}, "run.json")
    check_tree(nested(MOST_LEVELS), "run.json")
    check_tree([1] * (MOST_VALUES - 1), "run.json")


@pytest.mark.parametrize(
    ("tree", "mistake"),
    [
        (nested(MOST_LEVELS + 1), "run.json is nested more than 64 levels deep. Write it flatter."),
        ([1] * MOST_VALUES, "run.json holds more than 100,000 values. Keep data in a file of its own, and "),
        ({"a": 10**100}, "run.json holds an integer of more than 100 digits. Write a shorter one, or"),
        ({"a": -(1 << 10**6)}, "run.json holds an integer of more than 100 digits."),
        ([dt.date(2024, 1, 31)], "run.json holds 2024-01-31, a date; a configuration holds text, numbers, "),
        ({"a": b"x"}, "run.json holds b'x', a bytes; a configuration holds"),
        ({"a\ud800": 1}, r"run.json holds text that is not Unicode: half of a surrogate pair, in 'a\ud800'."),
    ],
)
def test_what_it_does_not_hold(tree, mistake):
    assert mistake_of(tree).startswith(mistake)


def test_a_tree_that_holds_itself_ends():
    tree: list[Any] = []
    tree += [tree, tree]
    assert "levels deep" in mistake_of(tree)


def test_a_value_counts_wherever_it_stands():
    """Ten aliases of ten aliases of ten: a few lines of YAML stand for more than memory holds."""
    tree: list[Any] = [1]
    for _ in range(30):
        tree = [tree] * 10
    assert "more than 100,000 values" in mistake_of(tree)


def test_the_containers_of_another_library_become_dict_and_list():
    """Hydra's DictConfig and ListConfig are a MutableMapping and a MutableSequence, and no dict and list."""
    given = UserDict({"a": UserList([UserDict({"b": (0.9, 0.99)})]), "c": "text"})
    made = plain_tree(given)
    assert made == {"a": [{"b": (0.9, 0.99)}], "c": "text"}
    assert [type(made), type(made["a"]), type(made["a"][0])] == [dict, list, dict]
