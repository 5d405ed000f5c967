"""The JSON schema of a configuration agrees with our own check, as far as structure goes."""

import math
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from lanewise.config import RunConfig
from lanewise.config.check import Section, read_section
from lanewise.config.schema import json_schema
from lanewise.config.strict_yaml import read_yaml
from lanewise.config.tree import check_tree
from lanewise.errors import ConfigError
from tests.integration.command import ROOT
from tests.soak.mutate_configurations import TREE, mutate, swap

SCHEMA = Draft202012Validator(json_schema(RunConfig))
EXAMPLES = sorted(ROOT.glob("examples/*/*.yaml"))


def sections(cls: type[Section] = Section) -> list[type[Section]]:
    return [one for direct in cls.__subclasses__() for one in (direct, *sections(direct))]


@pytest.fixture
def without_rules(monkeypatch):
    """Our check without what is no structure: rules of several keys, and what they compute."""
    for cls in sections():
        monkeypatch.setattr(cls, "RULES", ())


def is_structured(tree: Any) -> bool:
    try:
        read_section(RunConfig, tree)
    except ConfigError as error:
        return all(" must be a path: " in mistake for mistake in error.mistakes)
    return True


def has_odd_numbers(tree: Any) -> bool:
    """Tell whether there is 2.0, which JSON takes for an integer and we don't, or NaN."""
    if isinstance(tree, dict | list):
        return any(map(has_odd_numbers, tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, float) and (math.isnan(tree) or tree.is_integer())


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA.schema)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_fulfils_it(file):
    assert list(SCHEMA.iter_errors(yaml.safe_load(file.read_text()))) == []


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ({}, False),
        ({"batch": {"global_batch_size": 0, "micro_batch_size": 1}}, False),
        ({"batch": {"global_batch_size": 8, "micro_batch_size": "auto"}}, False),
        ({"memory": {"activation_checkpointing": "auto"}}, True),
        ({"compile": "everything"}, False),
        ({"train": {"run_dir": "x", "epoch": 3}}, False),
        ({"distributed": {"devices": True}}, False),
    ],
)
def test_what_is_known(without_rules, section, value):
    tree = {**TREE, **section} if section else {}
    assert is_structured(tree) == SCHEMA.is_valid(tree) == value


def damaged(random: Random) -> Iterator[Any]:
    """Yield the soak's damaged configurations, as far as they can be read."""
    ending, data, _ = mutate(random)
    with suppress(ConfigError, UnicodeDecodeError):
        tree = read_yaml(data.decode(), "a test") if ending in (".yaml", ".json") else swap(TREE, random)
        check_tree(tree, "a test")
        yield tree


def test_damaged_ones_are_refused_by_both(without_rules):
    random, counts = Random(0), {True: 0, False: 0}
    for _ in range(1500):
        for tree in damaged(random):
            if not has_odd_numbers(tree):
                found = is_structured(tree)
                counts[found] += 1
                assert SCHEMA.is_valid(tree) == found, tree
    assert min(counts.values()) > 200
