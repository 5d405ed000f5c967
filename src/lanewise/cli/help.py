"""Writes the help of a subcommand from what it declares."""

import textwrap
from collections.abc import Iterator

from lanewise.cli.arguments import Arguments, Command
from lanewise.config import RunConfig
from lanewise.config.check import Section
from lanewise.config.describe import describe_section

_WIDTH = 110


def write_help(command: Command, arguments: Arguments) -> str:
    """Write the usage, what the subcommand does, and every argument that it takes."""
    declared = [*command.operands, *command.options]
    usage = ["usage: lanewise", command.name, *(argument.usage for argument in declared)]
    lines = [(argument.spelling, argument.meaning) for argument in declared]
    if command.has_overrides:
        usage.append("[--key.path value ...]")
        lines.append(
            ("--key.path value", "sets a key of the configuration; `lanewise train --help` lists them")
        )
    lines.append(("--help", "shows this"))
    width = max(len(spelling) for spelling, _ in lines) + 4
    described: list[str] = []
    for spelling, meaning in lines:
        described += _wrap(meaning, indent=width, first=f"  {spelling}".ljust(width))
    first = _wrap(" ".join(usage), indent=6, first="")
    more = command.more_help(arguments)
    return "\n".join([*first, "", command.text.strip(), "", *described, "", more]).rstrip() + "\n"


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


def _wrap(text: str, *, indent: int, first: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
