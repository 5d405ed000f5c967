"""Shows the result of a command: on the terminal, and as JSON in a file."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lanewise.cli.arguments import Argument, read_path
from lanewise.errors import plain_lines, wrapped
from lanewise.runs.file import dump_json, writing

if TYPE_CHECKING:
    from rich.console import RenderableType

CONFIG = Argument[str]("CONFIG", "the configuration, as for `lanewise train`, whose --help lists its keys")
JSON = Argument[Path | None](
    "--json", "writes the result there as well; - prints it alone", "FILE", read_path, default=None
)


STDOUT = Path("-")
"""What stands for the standard output in the place of a file."""


class Result(Protocol):
    """What is shown: one or several tables, lines after them, and all of it as JSON."""

    def table(self) -> "RenderableType":
        """Draw what was found."""
        ...

    def lines(self) -> Iterable[str]:
        """Say what the table does not show."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        ...


def show_result(result: Result, heading: str, file: Path | None) -> None:
    """Print a result under a heading, and write it to the file if there is one; see `write_json`."""
    if file == STDOUT:
        write_json(file, result.to_json())
        return
    print(f"{wrapped(heading, sys.stdout)}\n")
    print_table(result.table())
    print()
    for line in result.lines():
        print(wrapped(plain_lines(line), sys.stdout))
    if file is not None:
        write_json(file, result.to_json())


def write_json(file: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON to a file, or to the standard output if it is called `-`."""
    text = dump_json(result, indent=1) + "\n"
    if file == STDOUT:
        print(text, end="")
        return
    with writing(file):
        file.write_text(text, encoding="utf-8")


def print_table(table: "RenderableType") -> None:
    """Print a table without spaces at the ends of its lines, as wide as a terminal is."""
    from rich.console import Console

    from lanewise.commands.printed import table_lines

    for line in table_lines(table, None) if Console().is_terminal else table_lines(table):
        print(line)


@contextmanager
def showing_progress() -> Iterator[Callable[[str], None]]:
    """Give a function that is told what is being done: a terminal has one line for it, a file one each."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False, soft_wrap=True)
        return
    with console.status("") as status:
        yield status.update
