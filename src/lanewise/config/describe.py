"""Describes the keys of a section in words, for `lanewise train --help` and docs/configuration.md."""

import ast
import inspect
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lanewise.config.check import Section

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """One key of a section; its texts are Markdown."""

    name: str
    kind: str
    """What its value must be."""
    default: str
    """`required` where there is none."""
    meaning: str
    section: type[Section] | None
    """What its value is, or each item of its value."""
    is_list: bool


def describe_section(cls: type[Section]) -> list[Key]:
    """Describe the keys of a section, without those of the sections inside of it."""
    hints, meanings = get_type_hints(cls, include_extras=True), _meanings(cls)
    return [
        Key(
            name=field.name,
            kind=_type_name(hints[field.name]),
            default=_default(field, _section_of(hints[field.name])),
            meaning=meanings[field.name],
            section=_section_of(hints[field.name]),
            is_list=get_origin(hints[field.name]) is tuple,
        )
        for field in fields(cls)
    ]


def _default(field: Field[Any], section: type[Section] | None) -> str:
    if field.default_factory is not MISSING:
        return "none" if section is None else "its defaults"
    if isinstance(field.default, bool):
        return f"`{field.default}`".lower()
    return {MISSING: "required", None: "unset", (): "none"}.get(field.default, f"`{field.default}`")


def _section_of(hint: Any) -> type[Section] | None:
    """Find the section in a type hint."""
    if isinstance(hint, type) and issubclass(hint, Section):
        return hint
    return next(filter(None, map(_section_of, get_args(hint))), None)


def _meanings(cls: type) -> dict[str, str]:
    """Return the text below each field."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    meanings = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            meanings[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return meanings


def _type_name(hint: Any) -> str:
    """Write a type hint as a user would."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(option) for option in arguments if option is not NoneType)
    if origin is Annotated:
        return ", ".join([_type_name(arguments[0]), *(mark.text for mark in arguments[1:])])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is not None:
        return "mapping"
    return _WORDS.get(hint, "section")
