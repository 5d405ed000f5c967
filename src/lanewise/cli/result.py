"""Shows the result of a command: on the terminal, and as JSON in a file."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lanewise.cli.arguments import Argument, read_path
from lanewise.run_file import writing

if TYPE_CHECKING:
    from rich.table import Table

CONFIG = Argument[str]("CONFIG", "the configuration, as for `lanewise train`, whose --help lists its keys")
JSON = Argument[Path | None]("--json", "writes the result there as well", "FILE", read_path, default=None)


class Result(Protocol):
    """What is shown: a table, lines after it, and all of it as JSON."""

    def table(self) -> "Table":
        """Draw what was found."""
        ...

    def lines(self) -> Iterable[str]:
        """Say what the table does not show."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        ...


def show_result(result: Result, heading: str, file: Path | None) -> None:
    """Print a result under a heading, and write it to the file if there is one."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(f"{heading}\n", markup=False)
    console.print(result.table())
    console.print()
    for line in result.lines():
        console.print(line, markup=False)
    if file is not None:
        with writing(file):
            file.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
