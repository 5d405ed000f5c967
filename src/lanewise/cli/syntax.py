"""What a subcommand declares: its arguments, its text, and the function that runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from lanewise.config.marks import expand_user
from lanewise.config.override import Override

T = TypeVar("T")

REQUIRED: Any = object()
"""Stands for the default of what must be given."""


@dataclass(frozen=True, eq=False)
class Argument(Generic[T]):
    """Anything that can be given to a subcommand."""

    name: str
    """As it is written: CONFIG for what is known by its place, --steps for an option."""
    meaning: str
    """A few words of help."""


@dataclass(frozen=True, eq=False)
class Operand(Argument[T]):
    """What a subcommand is about; it is known by its place."""

    read: Callable[[str], T]
    """Makes the value of the text; a ValueError completes the sentence that begins with `NAME must`."""
    default: T = REQUIRED


@dataclass(frozen=True, eq=False)
class Option(Argument[T]):
    """What is given with a value, as `--name value` or `--name=value`."""

    value_name: str
    """What to call the value in the help."""
    read: Callable[[str], T]
    """Makes the value of the text; a ValueError completes the sentence that begins with `--name must`."""
    default: T = REQUIRED


@dataclass(frozen=True, eq=False)
class Flag(Argument[bool]):
    """What is given without a value, as `--name`, and is false otherwise."""

    default: bool = False


@dataclass
class Given:
    """What was given to a subcommand."""

    wants_help: bool = False
    values: dict[Argument[Any], Any] = field(default_factory=dict)
    overrides: list[Override] = field(default_factory=list)
    """Of the configuration, in their order."""

    def __getitem__(self, argument: Operand[T] | Option[T] | Flag) -> T:
        """Return the value of an argument; its default, if it was not given."""
        value: T = self.values.get(argument, argument.default)
        return value


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand. Its name is that of its module, and its line in `lanewise.cli.main` makes it known."""

    name: str
    text: str
    """What it does; shown by `--help` as it is."""
    run: Callable[[Given], int]
    """Does it, and returns the exit code."""
    operands: tuple[Operand[Any], ...] = ()
    options: tuple[Option[Any] | Flag, ...] = ()
    has_overrides: bool = False
    """Whether each further option is a key of the configuration."""
    more_help: Callable[[Given], str] | None = None
    """Writes what `--help` shows below the options."""


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
