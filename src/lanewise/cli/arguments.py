"""Reads the arguments of every subcommand by the same rules.

No parser of a library does it: the options of a subcommand are known, the keys of a configuration, which are
options too, are not (`--task.init_args.width 32`), and all mistakes are to be shown at once.
"""

import difflib
from collections.abc import Sequence

from lanewise.cli.syntax import REQUIRED, Command, Flag, Given, Operand, Option
from lanewise.config.override import Override
from lanewise.errors import ConfigError

_HELP = ("-h", "--help")
_NEAR = 0.81  # keys of the configuration are options too, so that only what is very near is a misspelling


def read_arguments(command: Command, arguments: Sequence[str]) -> Given:
    """Read what follows the name of a subcommand.

    The value of an option follows it, or an equals sign. Everything may stand in any order. Without any
    argument, and beside `--help`, nothing is required.

    Raises:
        ConfigError: lists every mistake; those of overrides are left to whoever applies them.
    """
    given = Given()
    mistakes: list[str] = []
    operands: list[str] = []
    options = {option.name: option for option in command.options}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in _HELP:
            given.wants_help = True
            continue
        if not argument.startswith("-"):
            operands.append(argument)
            continue
        name, equals, text = argument.partition("=")
        near = _nearest(name, command)
        value = text if equals else None
        takes_value = isinstance(options.get(near), Option) or (command.has_overrides and not near)
        if takes_value and not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if name in options:
            mistakes += _take(options[name], value, given)
        elif near or not command.has_overrides or not name.startswith("--"):
            hint = f"Did you mean {near}?" if near else _valid(command)
            mistakes.append(f"{name} is not an option of {command.name}. {hint}")
        else:
            given.overrides.append(Override(name.removeprefix("--"), value))
    requires = bool(arguments) and not given.wants_help
    mistakes += _take_operands(operands, command, given, requires=requires)
    if requires:
        mistakes += [
            f"{command.name} needs {option.name} {option.value_name}: got none. Add it."
            for option in command.options
            if isinstance(option, Option) and option.default is REQUIRED and option not in given.values
        ]
    if mistakes:
        raise ConfigError(*mistakes)
    return given


def _nearest(name: str, command: Command) -> str:
    """Return the option that was meant; nothing if there is none like it."""
    known = [option.name for option in command.options] + list(_HELP[1:])
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)), "")


def _valid(command: Command) -> str:
    names = [option.name for option in command.options]
    keys = ["--key.path of the configuration"] if command.has_overrides else []
    return f"Valid here: {', '.join([*names, *keys, _HELP[1]])}."


def _take(option: Option[object] | Flag, text: str | None, given: Given) -> list[str]:
    """Note one option, or return what is wrong with it."""
    name = option.name
    if option in given.values:
        return [f"{name} is given twice. Give it once."]
    if isinstance(option, Flag):
        given.values[option] = True
        return [] if text is None else [f"{name} takes no value: got {text!r}. Write {name} alone."]
    if not text:
        given.values[option] = None  # it is not missing as well
        return [f"{name} needs a value. Write {name} VALUE, or {name}=VALUE."]
    return _read(option, text, given)


def _read(argument: Operand[object] | Option[object], text: str, given: Given) -> list[str]:
    given.values[argument] = None
    try:
        given.values[argument] = argument.read(text)
    except ValueError as error:
        return [f"{argument.name} must {error}: got {text!r}."]
    return []


def _take_operands(texts: Sequence[str], command: Command, given: Given, *, requires: bool) -> list[str]:
    """Note what the subcommand is about, or return what is wrong with it, missing or too much."""
    mistakes: list[str] = []
    for operand, text in zip(command.operands, texts, strict=False):
        mistakes += _read(operand, text, given)
    needed = [operand.name for operand in command.operands if operand.default is REQUIRED]
    if requires and len(texts) < len(needed):
        mistakes.append(f"{command.name} needs {' '.join(needed)}: got {' '.join(texts) or 'none'}. Name it.")
    names = " ".join(map(write_operand, command.operands))
    mistakes += [
        f"{command.name} takes {names}: got {extra} as well. An option begins with --; quote what has spaces."
        for extra in texts[len(command.operands) :]
    ]
    return mistakes


def write_operand(operand: Operand[object]) -> str:
    """Write what a subcommand is about; in brackets what may be left out."""
    return operand.name if operand.default is REQUIRED else f"[{operand.name}]"
