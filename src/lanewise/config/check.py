"""Turns a plain tree of mappings into the configuration's dataclasses and reports every mistake at once.

The dataclasses are the schema: field names are the keys, type hints say what a value must be, markers such as
`Annotated[int, at_least(1)]` give its range, and `RULES` hold what several fields must fulfil together.
Each mistake is one line that stands alone: the dotted key, the value, what is needed, and the remedy.
"""

import difflib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from lanewise.errors import ConfigError, collecting

S = TypeVar("S", bound="Section")

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# How other versions of YAML, and quoted values, write true and false.
_BOOLEANS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
_LONGEST_SHOWN_VALUE = 80
_MOST_SUGGESTIONS = 10  # each takes a moment to find


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Base of the configuration's sections: what breaks its types, ranges or rules cannot be made.

    Each class that is derived from it is a frozen dataclass whose fields are given by name.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    RULES: ClassVar[tuple[Callable[..., Iterable[str]], ...]] = ()
    """What several fields must fulfil together: functions whose parameters are names of fields. Each one is
    called when its fields are valid by themselves, and yields the mistakes."""

    MOVED: ClassVar[Mapping[str, str]] = {}
    """Keys that the section had in earlier versions, and the dotted keys that took their place."""

    GONE: ClassVar[Mapping[str, tuple[object, str]]] = {}
    """For each key: a value that it could have in earlier versions, and what to do instead."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    """Names that other programs have for dotted keys of the section."""

    TEXT_KEY: ClassVar[str] = ""
    """A text given in place of the section is the value of this key; empty: a text is a mistake."""

    LIST_KEYS: ClassVar[tuple[str, ...]] = ()
    """A list given in place of the section is the values of these keys; none: a list is a mistake."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        values, mistakes = _read_fields(type(self), vars(self), key="")
        if mistakes:
            raise ConfigError(*mistakes)
        for name, value in values.items():
            object.__setattr__(self, name, value)  # converted; the class is frozen from here on


class Mark(NamedTuple):
    """What a value must fulfil besides its type."""

    text: str
    """Completes the sentence that begins with `the value must be`."""
    holds: Callable[[Any], bool]
    schema: tuple[tuple[str, int], ...] = ()
    """Keys of a JSON schema that say the same, with their values."""


def at_least(bound: int) -> Mark:
    """Mark a number that must be `bound` or more."""
    return Mark(f"at least {bound}", lambda value: value >= bound, (("minimum", bound),))


def above(bound: int) -> Mark:
    """Mark a number that must be greater than `bound`; NaN never is."""
    return Mark(f"greater than {bound}", lambda value: value > bound, (("exclusiveMinimum", bound),))


def below(bound: int) -> Mark:
    """Mark a number that must be less than `bound`."""
    return Mark(f"less than {bound}", lambda value: value < bound, (("exclusiveMaximum", bound),))


def expand_user(path: str) -> str:
    """Write the folder of a user for a leading `~` or `~name`; a path with an unknown name is not changed."""
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib raises for an unknown name, and drops a "./"


def is_one_line(text: str) -> bool:
    """Tell whether text is a single line, so that it can stand in a line of a script or a manifest."""
    return len(f"{text}.".splitlines()) == 1


A_PATH = Mark(
    "a path", lambda text: "\0" not in text and is_one_line(text) and not expand_user(text).startswith("~")
)
"""Marks text that is a path, on one line; `~` is the user's folder."""


def read_section(cls: type[S], tree: object, key: str = "") -> S:
    """Turn a plain tree into the dataclass `cls`.

    Args:
        cls: the dataclass whose fields are the keys of `tree`.
        tree: what was read from a file, before any check.
        key: the dotted key of `tree` itself; empty for the whole configuration.

    Raises:
        ConfigError: lists every mistake of the tree.
    """
    names = [field.name for field in fields(cls)]
    section = key or "the configuration"
    if isinstance(tree, str) and cls.TEXT_KEY:
        tree = {cls.TEXT_KEY: tree}
    if isinstance(tree, list | tuple) and tree and len(tree) == len(cls.LIST_KEYS):
        tree = dict(zip(cls.LIST_KEYS, tree, strict=True))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{section} must be a section with the keys {', '.join(names)}: got {show(tree)}.")
    prefix = f"{key}." if key else ""
    others = [name for name in tree if name not in names]
    unknown = [
        f"{prefix}{name} is not a key of {section}. {_suggest_key(cls, name, prefix)}"
        for name in others[:_MOST_SUGGESTIONS]
    ]
    if len(others) > _MOST_SUGGESTIONS:
        num_more = len(others) - _MOST_SUGGESTIONS
        unknown.append(f"{num_more:,} more keys do not belong to {section}. Remove them.")
    values, mistakes = _read_fields(cls, tree, key)
    if unknown or mistakes:
        raise ConfigError(*unknown, *mistakes)
    return cls(**values)


def _suggest_key(cls: type[Section], name: object, prefix: str) -> str:
    """Say which key was probably meant: one that moved, one of that name below, or a similar one."""
    if name in cls.MOVED:
        return f"Use {cls.MOVED[str(name)]}, which took its place."
    if name in cls.ELSEWHERE:
        return f"Did you mean {prefix}{cls.ELSEWHERE[str(name)]}?"
    if below := [f"{prefix}{key}" for key in _keys_below(cls) if key.rpartition(".")[2] == name]:
        return f"Did you mean {' or '.join(below)}?"
    names = [field.name for field in fields(cls)]
    if "init_args" in names and nearest(str(name), names, cutoff=0.6) is None:
        return f"Did you mean {prefix}init_args.{name}?"
    return suggest(name, names, prefix)


def _keys_below(cls: type[Section]) -> Iterator[str]:
    """Yield the dotted keys of the sections in a section."""
    for name, hint in get_type_hints(cls).items():
        if _is_section(hint):
            for key in (*(field.name for field in fields(hint)), *_keys_below(hint)):
                yield f"{name}.{key}"


def suggest(word: object, known: Iterable[str], prefix: str = "") -> str:
    """Say which of the `known` words was probably meant, or list them all if none is near."""
    known = list(known)
    near = nearest(str(word), known, cutoff=0.6)
    return f"Did you mean {prefix}{near}?" if near else f"Valid here: {', '.join(known) or 'nothing'}."


def nearest(word: str, known: Iterable[str], cutoff: float) -> str | None:
    """Return the known word that was probably meant, regardless of case; None if none is near."""
    by_letters = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_letters, n=1, cutoff=cutoff)
    return by_letters[near[0]] if near else None


def show(value: object) -> str:
    """Write a value as it would stand in a configuration file, on one line, shortened if it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False, skipkeys=True)
    return text if len(text) <= _LONGEST_SHOWN_VALUE else f"{text[: _LONGEST_SHOWN_VALUE - 3]}..."


def _read_fields(
    cls: type[Section], tree: Mapping[str, object], key: str
) -> tuple[dict[str, Any], list[str]]:
    """Check every field and then every rule; return the valid values, defaults included, and the mistakes."""
    hints = get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    mistakes: list[str] = []
    for field in fields(cls):
        field_key = f"{key}.{field.name}" if key else field.name
        if field.name in tree:
            hint, value = hints[field.name], tree[field.name]
            gone, remedy = cls.GONE.get(field.name, (MISSING, ""))
            with collecting(mistakes):
                if value == gone:
                    raise ConfigError(f"{field_key} must be {_needed(hint)}: got {show(value)}. {remedy}")
                values[field.name] = _read_value(hint, value, field_key)
        elif field.default_factory is not MISSING:
            values[field.name] = field.default_factory()
        elif field.default is not MISSING:
            values[field.name] = field.default
        else:
            mistakes.append(
                f"{field_key} is missing: need {_needed(hints[field.name])}. Add the key {field_key}."
            )
    for rule in cls.RULES:
        needed = inspect.signature(rule).parameters
        if needed.keys() <= values.keys():
            mistakes += rule(**{name: values[name] for name in needed})
    return values, mistakes


def _read_value(hint: Any, value: Any, key: str) -> Any:
    """Check one value against its type hint and return it, converted where nothing is lost."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        options = [option for option in get_args(hint) if option is not NoneType]
        meant = [option for option in options if _fits(option, value)] or options
        if len(options) > 1 and (meant is options or not _holds(meant[0], value)):
            is_listed = isinstance(value, str) and any(get_origin(option) is tuple for option in options)
            remedy = f" Write [{value}]." if is_listed else ""
            raise ConfigError(
                f"{key} must be {' or '.join(map(_needed, options))}: got {show(value)}.{remedy}"
            )
        return _read_value(meant[0], value, key)
    if origin is Annotated:
        wanted, *marks = get_args(hint)
        value = _read_value(wanted, value, key)
        for mark in marks:
            if not mark.holds(value):
                raise ConfigError(f"{key} must be {mark.text}: got {show(value)}.")
        return value
    if _is_section(hint):
        return value if isinstance(value, hint) else read_section(hint, value, key)
    if not _fits(hint, value):
        raise ConfigError(f"{key} must be {_needed(hint)}: got {show(value)}{_remedy(hint, value)}")
    if origin is tuple:
        return tuple(_read_items(get_args(hint)[0], value, key))
    return float(value) if hint is float else value


def _read_items(hint: Any, values: Iterable[object], key: str) -> list[Any]:
    """Check every item of a list, whose keys are their numbers."""
    items: list[Any] = []
    mistakes: list[str] = []
    for number, value in enumerate(values):
        with collecting(mistakes):
            items.append(_read_value(hint, value, f"{key}.{number}"))
    if mistakes:
        raise ConfigError(*mistakes)
    return items


def _fits(hint: Any, value: object) -> bool:
    """Tell whether a value fits a type hint that is neither a union nor a section; marks do not count."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _fits(get_args(hint)[0], value)
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list | tuple)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _holds(hint: Any, value: object) -> bool:
    """Tell whether a float that fits a type hint is in its range."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated and isinstance(value, float) else ()
    return all(mark.holds(value) for mark in marks)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _needed(hint: Any) -> str:
    """Say what kind of value a type hint asks for."""
    origin = get_origin(hint)
    if origin is Annotated:
        wanted, *marks = get_args(hint)
        return f"{_needed(wanted)} {' and '.join(mark.text for mark in marks)}"
    if origin in (Union, UnionType):
        return " or ".join(map(_needed, get_args(hint)))
    if origin is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if origin is Mapping:
        return "a mapping of names to values"
    if origin is tuple:
        return f"a list, each item {_needed(get_args(hint)[0])}"
    if _is_section(hint):
        return f"a section with the keys {', '.join(field.name for field in fields(hint))}"
    return _KINDS[hint]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _remedy(hint: Any, value: object) -> str:
    """End the sentence about a value of the wrong type; say the right spelling where it can be guessed."""
    if isinstance(value, str) and get_origin(hint) is Literal:
        near = nearest(value, get_args(hint), cutoff=0.8)  # fp32 is not tf32, and gpu not cpu
        return f". Did you mean {near}?" if near else "."
    if isinstance(value, str) and hint is bool and value.lower() in _BOOLEANS:
        return f", which is text. Write {_BOOLEANS[value.lower()]}."
    if isinstance(value, str) and get_origin(hint) is tuple:
        return f". Write [{value}]."
    if isinstance(value, str):
        return f", which is text. Write {_needed(hint)}{', without quotes' if _is_number(value) else ''}."
    if isinstance(value, float) and hint is int and value.is_integer():
        return f". Write {int(value)}."
    if isinstance(value, (int, float)) and hint is str:
        return f'. Put it into quotes: "{show(value)}".'
    return f". Write {_needed(hint)}."
