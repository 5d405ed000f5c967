"""Writes the help of a subcommand from what it declares, as wide as the terminal is."""

import shutil
import textwrap
from collections.abc import Iterator

from lanewise.cli.arguments import Arguments, Command
from lanewise.config import RunConfig
from lanewise.config.check import Section
from lanewise.config.describe import describe_section

_WIDEST = 110


def help_width() -> int:
    """Return how wide help is written: as the terminal is, if that is not too wide to read."""
    return min(_WIDEST, shutil.get_terminal_size().columns)


def write_usage(command: Command) -> str:
    """Write what the subcommand takes, in a line or two."""
    declared = [*command.operands, *command.options]
    usage = [f"usage: lanewise {command.name}", *(argument.usage for argument in declared)]
    if command.has_overrides:
        usage.append("[--key.path value ...]")
    if command.takes_program:
        usage.append("[-- PROGRAM ...]")
    whole = [part.replace(" ", "\0") for part in usage]  # an option stays beside its value
    return "\n".join(_wrap(" ".join(whole), indent=6, first="")).replace("\0", " ")


def write_help(command: Command, arguments: Arguments) -> str:
    """Write the usage, what the subcommand does, and every argument that it takes."""
    lines = [(argument.spelling, argument.meaning) for argument in (*command.operands, *command.options)]
    if command.has_overrides:
        lines.append(
            ("--key.path value", "sets a key of the configuration; `lanewise train --help` lists them")
        )
    lines.append(("--help", "shows this"))
    width = max(len(spelling) for spelling, _ in lines) + 4
    described: list[str] = []
    for spelling, meaning in lines:
        described += _wrap(meaning, indent=width, first=f"  {spelling}".ljust(width))
    text, more = _fold(command.text.strip()), command.more_help(arguments)
    return "\n".join([write_usage(command), "", text, "", *described, "", more]).rstrip() + "\n"


def _fold(text: str) -> str:
    """Fold paragraphs; of a program, which is indented, a long line goes on after a backslash."""
    folded: list[str] = []
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith(" "):
            folded.append("\n".join(_wrap(paragraph, indent=0, first="")))
            continue
        width = help_width() - len(" \\")
        program = [
            " \\\n".join(textwrap.wrap(line, width, subsequent_indent=" " * 6, break_long_words=False))
            if len(line) > help_width()
            else line
            for line in paragraph.split("\n")
        ]
        folded.append("\n".join(program))
    return "\n\n".join(folded)


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
            kind = (
                f"list of sections with {' and '.join(part.name for part in describe_section(key.section))}"
            )
        default = key.default if key.default == "required" else f"default: {key.default}"
        yield from _wrap(_plain(f"{prefix}{key.name}  {kind}; {default}"), indent=6, first="  ")
        yield from _wrap(_plain(key.meaning), indent=6, first=" " * 6)
    for key in inner:
        assert key.section is not None
        required = " (required)" if key.default == "required" else ""
        yield ""
        heading = f"{prefix.removeprefix('--')}{key.name}{required}: {key.meaning}"
        yield from _wrap(_plain(heading), indent=2, first="")
        yield from _write_section(key.section, f"{prefix}{key.name}.")


def _plain(markdown: str) -> str:
    return markdown.replace("`", "")


def _wrap(text: str, *, indent: int, first: str) -> list[str]:
    return textwrap.wrap(
        text,
        help_width(),
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
