"""What a command found, as print() and a notebook show it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from rich.console import Console, RenderableType

_WIDTH = 200
"""Columns where nobody says how many there are; whoever reads it wraps it."""


class Printed(ABC):
    """A heading, a table, and lines after it."""

    @abstractmethod
    def heading(self) -> str:
        """Say what was run."""

    @abstractmethod
    def table(self) -> RenderableType:
        """Draw what was found."""

    @abstractmethod
    def lines(self) -> Iterable[str]:
        """Say what the table does not show."""

    def __str__(self) -> str:
        """Return all of it as text."""
        return "\n".join([self.heading(), "", *table_lines(self.table()), "", *self.lines()])

    __repr__ = __str__  # which a notebook shows


def table_lines(table: RenderableType, width: int | None = _WIDTH) -> list[str]:
    """Return a table as lines without spaces at their ends; a width of None is that of the terminal."""
    console = Console(highlight=False, width=width)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
