"""Reads YAML as version 1.2 defines it, without the surprises of version 1.1, which PyYAML implements.

`1e-3` is a number; `no`, `on`, `1:30` and dates are text; `010` is ten. A repeated key is a mistake, instead
of a value that is lost without a word. Tags such as `!!set` are refused.
"""

import re
from typing import Any, ClassVar, final

import yaml

from lanewise.config.tree import MOST_LEVELS, check_tree, read_integer, require_few, too_deep
from lanewise.errors import ConfigError

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeLoader  # type: ignore[assignment]

# The YAML 1.2 core schema: the tag of a plain scalar, its pattern, and the characters it can begin with.
_CORE_SCHEMA = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]


def read_yaml(text: str, source: str) -> object:
    """Read one YAML document, which may be a stranger's: a few aliases can stand for more than memory holds.

    Args:
        text: the document.
        source: what to call it in a mistake, for example its file name.

    Raises:
        ConfigError: the text is not valid YAML, or holds more than a configuration may, or a key occurs twice
            in one mapping.
    """
    require_few(text, source)
    try:
        _check_nodes(text, source)
        loader = _Loader(text, source)
        tree: object = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = " Indent by spaces, not by a tab." if mark and _begins_with_tab(text, mark.line) else ""
        raise ConfigError(f"{source}{place} is not valid YAML: {error.problem}.{hint}") from error
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from error
    if loader.repeated_keys:
        raise ConfigError(
            *(
                f"{source} has the key {key} twice in one mapping: on lines {first} and {second}. Remove one."
                for key, first, second in loader.repeated_keys
            )
        )
    check_tree(tree, source)
    return tree


def _begins_with_tab(text: str, line: int) -> bool:
    lines = text.splitlines()
    return line < len(lines) and "\t" in lines[line][: -len(lines[line].lstrip()) or None]


def write_yaml(tree: object) -> str:
    """Write a plain tree so that `read_yaml`, and a reader of YAML 1.1 too, gets the same tree back."""
    try:
        return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
    except yaml.representer.RepresenterError as error:
        kind = type(error.args[1]).__name__
        mistake = f"a configuration holds text, numbers, true, false, null, lists and mappings: got a {kind}."
        raise ConfigError(f"{mistake} Write it as one of these.") from error


@final
class _Refused(yaml.MarkedYAMLError):
    """The error for what YAML allows and a configuration does not."""

    def __init__(self, problem: str, event: yaml.Event) -> None:
        super().__init__(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]  # or C's


def _check_nodes(text: str, source: str) -> None:
    """Raise for what a configuration may not have, before the document is loaded.

    The loader calls itself for each level, and its version in C does not check the depth of the stack.
    """
    anchors: list[str | None] = []  # of the collections that are open
    for event in yaml.parse(text, Loader=SafeLoader):
        if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) is not None:
            raise _Refused("a configuration has no tags. Write the value alone", event)
        if isinstance(event, yaml.CollectionStartEvent):
            if len(anchors) == MOST_LEVELS:
                raise too_deep(source)
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchors.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in anchors:
            raise _Refused("an alias stands inside of what it names", event)


@final
class _Loader(SafeLoader):
    """Resolves plain scalars by the core schema alone and remembers repeated keys with their lines."""

    yaml_implicit_resolvers: ClassVar = {}  # type: ignore[misc]

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.source = source
        self.repeated_keys: list[tuple[object, int, int]] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the mapping of a node, noting the keys that occur twice."""
        mapping = super().construct_mapping(node, deep)
        lines: dict[object, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in lines:
                self.repeated_keys.append((key, lines[key], line))
            lines[key] = line
        return mapping

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        """Read an integer: a leading zero means nothing, 0o is octal, 0x is hexadecimal."""
        return read_integer(str(self.construct_scalar(node)), self.source)


@final
class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_core_int)
for _kind, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)
