"""A dataclass that is an argument of a class: its fields are listed, and a misspelt one is named."""

from dataclasses import dataclass, field

import pytest

from lanewise.config.argument_field import fields_of, unknown_field


@dataclass
class Head:
    num_classes: int = 10


@dataclass
class Model:
    num_layers: int
    width: int = 64
    head: Head = field(default_factory=Head)
    size: int = field(init=False, default=0)


def test_fields_are_listed_with_their_types_and_defaults():
    assert [(one.name, one.hint, one.default) for one in fields_of(Model | None)] == [
        ("num_layers", int, "required"),
        ("width", int, "default 64"),
        ("head.num_classes", int, "default 10"),
    ]
    assert list(fields_of(int | None)) == []


@pytest.mark.parametrize(
    ("value", "mistake"),
    [
        ({"layers": 3}, "model.layers is not a field of Model. Did you mean model.num_layers?"),
        (
            {"head": {"clases": 3}},
            "model.head.clases is not a field of Head. Did you mean model.head.num_classes?",
        ),
        ({"num_layers": "many"}, None),
        ({"class_path": "mine.Other", "init_args": {"layers": 3}}, None),
        (3, None),
    ],
)
def test_a_misspelt_field_is_named_with_the_nearest(value, mistake):
    assert unknown_field(Model | None, value, "model") == mistake
