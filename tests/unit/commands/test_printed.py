"""What a command found, as a user of Python sees it."""

from collections.abc import Iterator

from rich.table import Table

from lanewise.commands.printed import Printed, table_lines


class Found(Printed):
    def heading(self) -> str:
        return "2 steps"

    def table(self) -> Table:
        table = Table("layout", "loss", box=None, pad_edge=False)
        table.add_row("1 process", "same")
        return table

    def lines(self) -> Iterator[str]:
        yield "verified"


def test_print_and_a_notebook_show_heading_table_and_lines():
    text = "2 steps\n\nlayout     loss\n1 process  same\n\nverified"
    assert str(Found()) == text
    assert repr(Found()) == text


def test_lines_of_a_table_end_without_spaces():
    table = Table("name", "value", box=None)
    table.add_row("a", "")
    assert all(line == line.rstrip() for line in table_lines(table))
