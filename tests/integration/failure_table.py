"""Lets runs fail in every way of `cases`, and writes what happened as the tables of failures.md beside it.

    make failures

It needs root, for hosts of its own, and takes about ten minutes. What is not as it must be is for
tests/integration/test_failure.py to find.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.integration import cases
from tests.integration.cases import Case
from tests.integration.command import ROOT
from tests.integration.failing import STALL_SECONDS, Ended, Terminal

PAGE = ROOT / "tests" / "integration" / "failures.md"
HEADING = "## Measured"
MOST_CHARACTERS = 200


def main() -> None:
    """Write the tables."""
    one = [(case, "lanewise", 1, "") for case in (*cases.MATRIX, *cases.PHASES)]
    two = [
        (case, launcher, rank, where)
        for case in cases.MATRIX
        for launcher, rank, where in (("c10d", 0, " on the first host"), ("static", 3, " on the second host"))
    ]
    two += [(case, "static", 0, "") for case in cases.BETWEEN_HOSTS]
    over = [
        (case, "ssh", rank, where)
        for case in cases.OVER_SSH
        for rank, where in ((0, " on the first host"), (3, " on the second host"))
    ]
    over += [(case, "ssh", 0, "") for case in (cases.BETWEEN_HOSTS[0], cases.OF_THE_LAUNCHER)]
    text = (
        f"{datetime.now(tz=UTC).date()}, torch {torch.__version__}, on the CPU, with `stall_seconds` "
        f"{STALL_SECONDS:g}. Seconds are those from the fault until no process was left on any host.\n\n"
        "One machine, `lanewise train --distributed.devices 2`:\n\n"
        f"{table(one)}\n\n"
        "Two hosts, torchrun with two processes on each. Where both terminals showed the same first, it is "
        f"given once:\n\n{table(two)}\n\n"
        "Two hosts with two processes each, `distributed.launcher: ssh`. There is one terminal:\n\n"
        f"{table(over)}\n"
    )
    written = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    PAGE.write_text(f"{written}{HEADING}\n\n{text}", encoding="utf-8")


def table(runs: Sequence[tuple[Case, str, int, str]]) -> str:
    """Let runs fail, and return a row for each."""
    header = ("fault", "what a terminal shows first", "seconds", "exit code")
    lines = [header, ("---",) * len(header), *(row(*run) for run in runs)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(case: Case, launcher: str, rank: int, where: str) -> tuple[str, ...]:
    """Let a run fail, and return the cells of its row."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        ended = case.run(Path(folder), launcher, rank)
    shown = " / ".join(distinct(ended)) or "nothing"
    seconds = "never" if ended.seconds is None else f"{ended.seconds:.1f}"
    codes = " / ".join(dict.fromkeys(str(one.code) for one in ended.terminals))
    cells = (f"{case.what}{where}", shown, seconds, codes)
    print(*cells, sep=" | ", flush=True)
    return cells


def distinct(ended: Ended) -> Iterator[str]:
    """Yield what the terminals showed first, each once."""
    yield from dict.fromkeys(f"`{first}`" for one in ended.terminals if (first := first_words(one)))


def first_words(terminal: Terminal) -> str:
    """Return the first line of the first error and, after a traceback, what was raised."""
    first, *more = terminal.first_error.splitlines() or [""]
    if more and more[0].startswith("Traceback"):
        more = [line for line in more[1:] if not line.startswith(" ")]
    if more and not more[0].startswith("("):
        first = f"{first} ... {more[0]}"
    first = re.sub(r"\S*/(\S+)", r"\1", first)  # of a path the last name
    return first if len(first) <= MOST_CHARACTERS else f"{first[:MOST_CHARACTERS]} ..."


if __name__ == "__main__":
    main()
