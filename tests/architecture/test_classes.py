"""A class is a protocol, abstract, or final; nothing inherits from a class that is used as it is.

Exceptions, named tuples, enumerations and dataclasses need not say which they are.
"""

import ast
from collections.abc import Iterable, Mapping

import pytest

from tests.architecture.test_layers import SRC, read_sources

MADE_TO_INHERIT_FROM = {"Protocol", "ABC"}
NEED_NOT_SAY = {"NamedTuple", "Enum", "StrEnum", "TypedDict"}
FOR_USERS = {"Callback": "has a method for each event that does nothing, and users override some of them"}
"""Classes that are made to inherit from without an abstract method."""


def names(nodes: Iterable[ast.expr]) -> set[str]:
    """The last names of base classes or decorators: `typing.final` is 'final', `Generic[T]` is 'Generic'."""
    found = set()
    for node in nodes:
        name = node
        while isinstance(name, ast.Call | ast.Subscript):
            name = name.func if isinstance(name, ast.Call) else name.value
        found.add(name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", ""))
    return found


def is_made_to_inherit_from(node: ast.ClassDef) -> bool:
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    has_abstract = any("abstractmethod" in names(method.decorator_list) for method in methods)
    makes_dataclasses = "dataclass_transform" in names(node.decorator_list)
    is_base = names(node.bases) & MADE_TO_INHERIT_FROM or node.name in FOR_USERS
    return bool(has_abstract or makes_dataclasses or is_base)


def is_exception(node: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> bool:
    bases = names(node.bases)
    return bool(bases & {"Exception", "ValueError", "RuntimeError"}) or any(
        is_exception(known[base], known) for base in bases & known.keys()
    )


def complaints(sources: Iterable[str]) -> list[str]:
    """One line for each class that does not say what it is, or inherits from one that is used as it is."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    known = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found = []
    for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
        decorators, bases = names(node.decorator_list), names(node.bases)
        says = "final" in decorators or is_made_to_inherit_from(node)
        makers = {name for name, one in known.items() if "dataclass_transform" in names(one.decorator_list)}
        is_dataclass = "dataclass" in decorators or bases & makers
        needs_not = is_dataclass or bases & NEED_NOT_SAY or is_exception(node, known)
        if not says and not needs_not:
            found.append(f"{node.name} is not a protocol, not abstract, and not final")
        found += [
            f"{node.name} inherits from {base}, which is used as it is"
            for base in sorted(bases & known.keys())
            if not is_made_to_inherit_from(known[base]) and not is_exception(known[base], known)
        ]
    return found


def test_every_class_says_what_it_is():
    sources = read_sources(SRC)
    assert "lanewise.errors" in sources
    assert complaints(sources.values()) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class A: ...", ["A is not a protocol, not abstract, and not final"]),
        ("@final\nclass A: ...", []),
        ("class A(typing.Protocol): ...", []),
        ("class A:\n    @abc.abstractmethod\n    def f(self): ...", []),
        ("@dataclass(frozen=True)\nclass A: ...", []),
        ("@dataclass_transform()\nclass A: ...\nclass B(A): ...", []),
        ("class A(NamedTuple): ...\nclass B(Wrong): ...\nclass Wrong(ValueError): ...", []),
        ("class A(ABC): ...\n@final\nclass B(A[int]): ...", []),
        (
            "@dataclass\nclass A: ...\n@dataclass\nclass B(A): ...",
            ["B inherits from A, which is used as it is"],
        ),
        ("@final\nclass A: ...\n@final\nclass B(A): ...", ["B inherits from A, which is used as it is"]),
    ],
)
def test_what_is_found(source, expected):
    assert complaints([source]) == expected
