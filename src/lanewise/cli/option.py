"""Reads the arguments of a command: what it is about, its own options, and overrides of the configuration."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from lanewise.errors import ConfigError


@dataclass(frozen=True)
class Syntax:
    """What a command takes; every command is read by the same rules.

    An option's value follows it, or an equals sign. Everything may stand in any order.
    """

    command: str
    names: tuple[str, ...]
    """What it is about, such as CONFIG; in brackets what may be left out."""
    flags: tuple[str, ...] = ()
    """Options without a value."""
    options: tuple[str, ...] = ()
    """Options with one."""
    has_overrides: bool = False
    """Whether each further option is a key of the configuration."""


@dataclass
class Given:
    """What was given to a command."""

    wants_help: bool = False
    names: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    options: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    """As `load_config` takes them: each with an equals sign, if it has a value."""


def read_arguments(arguments: Sequence[str], syntax: Syntax) -> Given:
    """Read what follows the name of a command. Without any argument nothing is required.

    Raises:
        ConfigError: lists every mistake.
    """
    given = Given()
    mistakes: list[str | None] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            given.wants_help = True
        elif not argument.startswith("-"):
            given.names.append(argument)
        else:
            name, equals, text = argument.partition("=")
            value = text if equals else None
            takes_value = name in syntax.options or (syntax.has_overrides and name not in syntax.flags)
            if takes_value and not equals and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            mistakes.append(_take(name, value, syntax, given))
    if arguments and not given.wants_help:
        mistakes += _miscounted(given.names, syntax)
    if any(mistakes):
        raise ConfigError(*filter(None, mistakes))
    return given


def _take(name: str, value: str | None, syntax: Syntax, given: Given) -> str | None:
    """Note one option, or return what is wrong with it."""
    if name in given.flags or name in given.options:
        return f"{name} is given twice. Give it once."
    if name in syntax.flags:
        given.flags.add(name)
        return None if value is None else f"{name} takes no value: got {value!r}. Write {name} alone."
    if name in syntax.options:
        given.options[name] = value or ""
        return None if value else f"{name} needs a value. Write {name} VALUE, or {name}=VALUE."
    known = [*syntax.flags, *syntax.options, "--help"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if near or not syntax.has_overrides:
        hint = f"Did you mean {near[0]}?" if near else f"Valid here: {', '.join(known)}."
        return f"{name} is not an option of {syntax.command}. {hint}"
    given.overrides.append(name if value is None else f"{name}={value}")
    return None


def _miscounted(names: Sequence[str], syntax: Syntax) -> list[str]:
    """Say what is missing, or too much."""
    needed = [name for name in syntax.names if not name.startswith("[")]
    if len(names) < len(needed):
        return [f"{syntax.command} needs {' '.join(needed)}: got {' '.join(names) or 'none'}. Name it."]
    return [
        f"{syntax.command} takes {' '.join(syntax.names)}: {extra} is too much. An option begins with --."
        for extra in names[len(syntax.names) :]
    ]
