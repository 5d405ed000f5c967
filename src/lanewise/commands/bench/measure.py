"""Lets the processes of some rows take turns until the rows are steady."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

from lanewise.commands.bench.job import LEAST_ROUNDS, BenchJob
from lanewise.commands.bench.rounds import take_turns
from lanewise.commands.bench.row import BenchRow
from lanewise.commands.bench.side import Side
from lanewise.errors import LanewiseError, text_of

Show = Callable[[str], None]
"""Is told what is being done."""


def start(row: BenchRow, jobs: Callable[[], Sequence[BenchJob]], folder: Path) -> Side | None:
    """Start the processes of a row; None where they fail, which the row notes.

    Args:
        row: of these processes.
        jobs: returns the job of each of their worlds.
        folder: where sockets may lie.
    """
    try:
        side = Side(jobs(), folder / uuid4().hex[:8])
    except LanewiseError as error:
        row.failure = text_of(error)
        return None
    row.firsts = side.firsts
    return side


def take_rounds(sides: Mapping[BenchRow, Side], end: float, show: Show) -> None:
    """Let the sides take turns until all rows are steady, or the time is over.

    Args:
        sides: by their rows, which note the turns, or why a side failed.
        end: of the time, by `time.monotonic`; there are always enough rounds to tell how much they differ.
        show: see `Show`.
    """
    turns = {row: partial(_take_turn, row, side) for row, side in sides.items()}
    for number, _ in enumerate(take_turns(turns), start=1):
        rows = [row for row in sides if not row.failure]
        num_noisy = sum(not row.is_steady for row in rows)
        show(f"round {number}: {num_noisy} of {len(rows)} rows are noisy")
        if not num_noisy or (number >= LEAST_ROUNDS and time.monotonic() > end):
            return


def _take_turn(row: BenchRow, side: Side) -> None:
    if row.failure:
        return
    try:
        row.rounds.append(side.take_turn())
    except LanewiseError as error:
        row.failure = text_of(error)
