"""What a subcommand declares, and how its arguments are read, by the same rules for every subcommand.

No library's parser does this: the options of a subcommand are known, but not the keys of a configuration,
which are options too (`--task.init_args.width 32`); and all mistakes are shown at once.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from lanewise.config.check import expand_user
from lanewise.config.load import Override
from lanewise.errors import ConfigError

T = TypeVar("T")

REQUIRED: Any = object()
"""Stands for the default of an argument that must be given."""
_HELP = ("-h", "--help")
_ON_EACH_HOST = (
    "On each host: torchrun --nnodes N --node-rank NR --master-addr HOST --master-port 29400 "
    "--nproc-per-node G -m lanewise {command} ..."
)
_OF_PROGRAMS = {"-g": "Write --distributed.devices {value}.", "-n": _ON_EACH_HOST, "-nr": _ON_EACH_HOST}
"""What programs that call mp.spawn name the GPUs of a host, the hosts, and the number of a host."""
_NEAR = 0.81  # keys of the configuration are options too, so only a very similar name is a misspelling


@dataclass(frozen=True, eq=False)
class Argument(Generic[T]):
    """What can be given to a subcommand.

    CONFIG is an operand, which is known by its place. `--steps N` is an option with a value, which may be
    written `--steps=N` too. `--resume` is a flag, an option without a value.
    """

    name: str
    meaning: str
    """A few words of help."""
    value_name: str = ""
    """What the help calls the value of an option; operands and flags have none."""
    read: Callable[[str], T] = str  # type: ignore[assignment]  # where T is str
    """Makes the value of the text; a ValueError completes the sentence that begins with `NAME must`."""
    default: T = REQUIRED
    is_repeated: bool = False
    """Whether an operand, the last one, may be given several times; `Arguments.all_of` returns them."""

    @property
    def spelling(self) -> str:
        """How it is written on the command line."""
        return f"{self.name} {self.value_name}".rstrip()

    @property
    def usage(self) -> str:
        """Its spelling; in brackets if it may be left out, with dots if it may be repeated."""
        spelling = self.spelling if self.default is REQUIRED else f"[{self.spelling}]"
        return f"{spelling} ..." if self.is_repeated else spelling


def flag(name: str, meaning: str) -> Argument[bool]:
    """Declare a flag, which is false where it is not given."""
    return Argument(name, meaning, default=False)


@dataclass
class Arguments:
    """The arguments that were given to a subcommand."""

    wants_help: bool = False
    values: dict[Argument[Any], Any] = field(default_factory=dict)
    further: list[Any] = field(default_factory=list)
    """Values of the last operand after the first one, where it may be repeated."""
    overrides: list[Override] = field(default_factory=list)
    """The overrides of the configuration, in their order."""
    program: Sequence[str] | None = None
    """What follows `--`, where the subcommand takes a program; None where there is no `--`."""

    def all_of(self, operand: Argument[T]) -> Sequence[T]:
        """Return the values of an operand that may be repeated."""
        return [self[operand], *self.further]

    def __getitem__(self, argument: Argument[T]) -> T:
        """Return the value of an argument; its default, if it was not given."""
        value: T = self.values.get(argument, argument.default)
        return value


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand. Its name is that of its module, and its line in `lanewise.cli.main` makes it known."""

    name: str
    text: str
    """What it does; shown by `--help` as it is."""
    run: Callable[[Arguments], int]
    """Does it, and returns the exit code."""
    operands: tuple[Argument[Any], ...] = ()
    options: tuple[Argument[Any], ...] = ()
    has_overrides: bool = False
    """Whether each further option is a key of the configuration."""
    takes_program: bool = False
    """Whether `--` and a program may stand in place of the operands."""
    more_help: Callable[[Arguments], str] = lambda _: ""
    """Writes what `--help` shows below the options."""


def read_arguments(command: Command, arguments: Sequence[str]) -> Arguments:
    """Read what follows the name of a subcommand.

    The value of an option follows it, or an equals sign. Everything may stand in any order. Beside `--help`
    nothing is required.

    Raises:
        ConfigError: lists every mistake but those of overrides, which `apply_overrides` finds.
    """
    found = Arguments()
    mistakes: list[str] = []
    operands: list[str] = []
    options = {option.name: option for option in command.options}
    rest = _before_program(command, arguments, found)
    while rest:
        argument = rest.pop(0)
        if argument in _HELP:
            found.wants_help = True
            continue
        if not argument.startswith("-"):
            operands.append(argument)
            continue
        name, equals, text = argument.partition("=")
        near = next(iter(difflib.get_close_matches(name, [*options, _HELP[1]], n=1, cutoff=_NEAR)), "")
        value = text if equals else None
        takes_value = options[near].value_name if near in options else command.has_overrides and not near
        if takes_value and not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if name in options:
            mistakes += _take(options[name], value, found.values)
        elif near or not command.has_overrides or not name.startswith("--"):
            hint = f"Did you mean {near}?" if near else _hint(command, name, value)
            mistakes.append(f"{name} is not an option of {command.name}. {hint}")
        else:
            found.overrides.append(Override(name.removeprefix("--"), value))
    for operand, text in zip(command.operands, operands, strict=False):
        mistakes += _read(operand, text, found.values)
    if not found.wants_help:
        mistakes += _missing(command, operands, found)
    if command.operands and command.operands[-1].is_repeated:
        last, extra = command.operands[-1], operands[len(command.operands) :]
        del operands[len(command.operands) :]
        for text in extra:
            values: dict[Argument[Any], Any] = {}
            mistakes += _read(last, text, values)
            found.further.append(values[last])
    names = " ".join(operand.usage for operand in command.operands)
    mistakes += [
        f"{command.name} takes {names}: got {extra} as well. An option begins with --; quote what has spaces."
        for extra in operands[len(command.operands) :]
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    return found


def _before_program(command: Command, arguments: Sequence[str], found: Arguments) -> list[str]:
    """Return the arguments before the program, if one is given, and note the program."""
    if not command.takes_program or "--" not in arguments:
        return list(arguments)
    place = arguments.index("--")
    found.program = arguments[place + 1 :]
    return list(arguments[:place])


def _hint(command: Command, name: str, value: str | None) -> str:
    """Say what to write in place of an option that the subcommand does not have."""
    if name in _OF_PROGRAMS and command.has_overrides:
        return _OF_PROGRAMS[name].format(value=value or "G", command=command.name)
    names = [option.name for option in command.options]
    keys = ["--key.path of the configuration"] if command.has_overrides else []
    return f"Valid here: {', '.join([*names, *keys, _HELP[1]])}."


def _take(option: Argument[Any], text: str | None, values: dict[Argument[Any], Any]) -> Iterator[str]:
    """Note the value of one option, or yield what is wrong with it."""
    name = option.name
    if option in values:
        yield f"{name} is given twice. Give it once."
    elif not option.value_name:
        values[option] = True
        if text is not None:
            yield f"{name} takes no value: got {text!r}. Write {name} alone."
    elif not text:
        values[option] = None  # it is not missing as well
        yield f"{name} needs a value. Write {name} VALUE, or {name}=VALUE."
    else:
        yield from _read(option, text, values)


def _read(argument: Argument[Any], text: str, values: dict[Argument[Any], Any]) -> Iterator[str]:
    values[argument] = None
    try:
        values[argument] = argument.read(text)
    except ValueError as error:
        yield f"{argument.name} must {error}: got {text!r}."


def _missing(command: Command, operands: Sequence[str], found: Arguments) -> Iterator[str]:
    """Yield which arguments are required and were not given."""
    needed = [operand.name for operand in command.operands if operand.default is REQUIRED]
    if found.program is None and len(operands) < len(needed):
        yield f"{command.name} needs {' '.join(needed)}: got {' '.join(operands) or 'none'}. Name it."
    for option in command.options:
        if option.default is REQUIRED and option not in found.values:
            yield f"{command.name} needs {option.spelling}: got none. Add it."


def read_path(text: str) -> Path:
    """Read a path; a shell leaves the `~` of `--name=~/folder` as it is."""
    return Path(expand_user(text))


def read_count(text: str) -> int:
    """Read a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("be a number from 1 on")
    return int(text)


def read_counts(text: str) -> Sequence[int]:
    """Read numbers from 1 on, with commas between them."""
    try:
        return [read_count(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("list numbers from 1 on, such as 1,2,4") from None
