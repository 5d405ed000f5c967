"""Describes a configuration as a JSON schema, by which an editor completes and checks what is written.

https://json-schema.org/draft/2020-12. Only `check` knows what several keys must fulfil together, and whether
text is a path.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lanewise.config.check import Section
from lanewise.config.describe import describe_section

SCHEMA_FILE = "lanewise.schema.json"
EDITOR_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
"""Names the schema beside a YAML file, to editors that read such lines."""
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema(cls: type[Section]) -> dict[str, Any]:
    """Return the JSON schema of a section and all below it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a configuration of lanewise",
        **_section(cls),
    }


def _section(cls: type[Section]) -> dict[str, Any]:
    hints, keys = get_type_hints(cls, include_extras=True), {key.name: key for key in describe_section(cls)}
    properties, required = {}, []
    for field in fields(cls):
        properties[field.name] = {**_value(hints[field.name]), "description": keys[field.name].meaning}
        if field.default is not MISSING:
            properties[field.name]["default"] = list(field.default) if field.default == () else field.default
        elif field.default_factory is MISSING:
            required.append(field.name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    others = [_value(hints[cls.TEXT_KEY])] if cls.TEXT_KEY else []
    if cls.LIST_KEYS:
        items = [_value(hints[name]) for name in cls.LIST_KEYS]
        others.append({"type": "array", "prefixItems": items, "minItems": len(items), "items": False})
    return {"anyOf": [schema, *others]} if others else schema


def _value(hint: Any) -> dict[str, Any]:
    """Return the schema of what a type hint admits, as `check` reads it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_value(option) for option in arguments]}
    if origin is Annotated:
        wanted, *marks = arguments
        bounds = dict(pair for mark in marks for pair in mark.schema)
        return {**_value(wanted), **bounds}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is Mapping:
        return {"type": "object"}
    if origin is tuple:
        return {"type": "array", "items": _value(arguments[0])}
    if isinstance(hint, type) and issubclass(hint, Section):
        return _section(hint)
    return {"type": "null" if hint is NoneType else _TYPES[hint]}
