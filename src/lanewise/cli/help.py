"""Writes the help of a subcommand from what it declares."""

import textwrap
from collections.abc import Iterator

from lanewise.cli.arguments import write_operand
from lanewise.cli.syntax import REQUIRED, Command, Flag, Given, Option
from lanewise.config import RunConfig
from lanewise.config.check import Section
from lanewise.config.describe import describe_section

_WIDTH = 110


def write_help(command: Command, given: Given) -> str:
    """Write the usage, what the subcommand does, and every argument that it takes."""
    operands = [(operand.name, operand.meaning) for operand in command.operands]
    options = [(_spelling(option), option.meaning) for option in command.options]
    overrides = [("--key.path value", "sets a key of the configuration; `lanewise train --help` lists them")]
    usage = [
        f"usage: lanewise {command.name}",
        *map(write_operand, command.operands),
        *(
            _spelling(option) if option.default is REQUIRED else f"[{_spelling(option)}]"
            for option in command.options
        ),
        *(["[--key.path value ...]"] if command.has_overrides else []),
    ]
    lines = [
        *operands,
        *options,
        *(overrides if command.has_overrides else []),
        ("--help", "shows this"),
    ]
    more = ["", command.more_help(given)] if command.more_help is not None else []
    width = max(len(spelling) for spelling, _ in lines) + 4
    arguments = (
        line
        for spelling, meaning in lines
        for line in _wrap(meaning, indent=width, first=f"  {spelling}".ljust(width))
    )
    first = _wrap(" ".join(usage), indent=6, first="")
    return "\n".join([*first, "", command.text.strip(), "", *arguments, *more]).rstrip() + "\n"


def write_keys() -> str:
    """Write every key of the configuration as an option, with its type, default and meaning."""
    return "\n".join(["Keys of the configuration:", *_write_section(RunConfig, "--"), ""])


def _write_section(cls: type[Section], prefix: str) -> Iterator[str]:
    """Write the keys of a section; those of the sections inside of it come last."""
    keys = describe_section(cls)
    inner = [key for key in keys if key.section is not None and not key.is_list]
    for key in keys:
        if key in inner:
            continue
        kind = key.kind
        if key.section is not None:
            kind = f"list of sections with {' and '.join(one.name for one in describe_section(key.section))}"
        default = key.default if key.default == "required" else f"default: {key.default}"
        yield _plain(f"  {prefix}{key.name}  {kind}; {default}")
        yield from _wrap(_plain(key.meaning), indent=6, first=" " * 6)
    for key in inner:
        assert key.section is not None
        required = " (required)" if key.default == "required" else ""
        yield ""
        yield _plain(f"{prefix.removeprefix('--')}{key.name}{required}: {key.meaning}")
        yield from _write_section(key.section, f"{prefix}{key.name}.")


def _plain(markdown: str) -> str:
    return markdown.replace("`", "")


def _spelling(option: Option[object] | Flag) -> str:
    return option.name if isinstance(option, Flag) else f"{option.name} {option.value_name}"


def _wrap(text: str, *, indent: int, first: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
