"""Prints docs/configuration.md from the configuration's dataclasses: `python docs/write_configuration.py`."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lanewise.config import run
from lanewise.config.check import Section

HEAD = """\
# Configuration

Every key of a configuration, as a file (YAML, JSON, TOML or Jsonnet), as `--section.key value`, or as a
section that `lanewise.train` takes. `lanewise train CONFIG --help` lists the arguments of the classes
that it names.
"""

TAIL = """\
A scheduler is stepped once in each optimizer step, on any number of processes. The number of steps that a
run will take is printed before the first one.

## Limits

A configuration is a regular file of at most 1,048,576 characters, with at most 100,000 values in it, nested
at most 64 levels deep, and integers of at most 100 digits. Text is Unicode. YAML is read as version 1.2 reads
it, without tags such as `!!set`. TOML's dates are put into quotes. A Jsonnet program has 10 seconds and 1 GiB
of memory.
"""


def main() -> str:
    """Return the page: the whole configuration first, then each section under the names of its keys."""
    parts = [HEAD, write_section("Sections", run.RunConfig)]
    sections: dict[type[Section], list[str]] = {}
    for key, cls in sections_in(run.RunConfig):
        sections.setdefault(cls, []).append(key)
    parts += [write_section(", ".join(keys), cls) for cls, keys in sections.items()]
    return "\n".join([*parts, TAIL])


def sections_in(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections inside of one with their dotted keys, and those inside of these after each."""
    hints = get_type_hints(cls)
    for field in fields(cls):  # type: ignore[arg-type]  # each section is a dataclass
        for inner in classes_in(hints[field.name]):
            yield f"{prefix}{field.name}", inner
            yield from sections_in(inner, f"{prefix}{field.name}.")


def classes_in(hint: Any) -> list[type[Section]]:
    """Find the sections in a type hint."""
    if isinstance(hint, type) and issubclass(hint, Section):
        return [hint]
    return [cls for option in get_args(hint) for cls in classes_in(option)]


def write_section(title: str, cls: type[Section]) -> str:
    """Write the table of one section."""
    hints, docs = get_type_hints(cls, include_extras=True), field_docs(cls)
    lines = [f"## {title}", "", inspect.cleandoc(cls.__doc__ or ""), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields(cls):  # type: ignore[arg-type]  # each section is a dataclass
        if field.default_factory is not MISSING:
            default = "its defaults" if classes_in(hints[field.name]) else "none"
        else:
            default = {MISSING: "required", None: "unset", (): "none"}.get(
                field.default, f"`{field.default}`"
            )
        lines.append(f"| `{field.name}` | {type_name(hints[field.name])} | {default} | {docs[field.name]} |")
    return "\n".join([*lines, ""])


def field_docs(cls: type) -> dict[str, str]:
    """Return the text below each field."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs


def type_name(hint: Any) -> str:
    """Write a type hint as a user would."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(type_name(option) for option in arguments if option is not NoneType)
    if origin is Annotated:
        return ", ".join([type_name(arguments[0]), *(str(mark) for mark in arguments[1:])])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is not None:
        return "mapping"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(hint, "section")


if __name__ == "__main__":
    print(main(), end="")
