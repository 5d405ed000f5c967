"""Cuts files of JSON lines back to the step from which a run goes on."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lanewise.runs.file import json_object, open_regular, replacing, writing

logger = logging.getLogger(__name__)

_RANK = re.compile(r"rank-[0-9]{5,9}\.jsonl")

_MAX_LINE = 16 * 2**20
"""The most bytes of a line of a file that may be anything; norms of 100,000 parameters take about as much."""


def is_evaluation(columns: Mapping[str, Any]) -> bool:
    """Tell whether a line of metrics.jsonl is an evaluation: no step, no epoch's reads, no event."""
    return not columns.keys() & {"train/learning_rate", "data/skipped_samples", "event"}


def cut(
    path: Path,
    after_step: int,
    *,
    evaluates_first: bool = False,
    note: Callable[[Mapping[str, Any]], object] = lambda _: None,
) -> None:
    """Remove the lines of the steps after one, and those that are damaged, which a warning counts.

    An unfinished last line, of a killed run, is removed without a warning.

    Args:
        path: a file of lines, each with its step; it need not be there.
        after_step: the last step whose lines stay.
        evaluates_first: whether to remove the evaluation after this step as well.
        note: is called with each line that stays.
    """
    if not os.path.lexists(path):
        return
    damaged: list[int] = []
    with replacing(path) as new, open_regular(path) as lines, new.open("wb") as kept:
        for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE), b""), start=1):
            columns = json_object(line)
            if columns is None or type(columns.get("step")) is not int:
                if line.endswith(b"\n"):
                    damaged.append(number)
                continue
            is_repeated = evaluates_first and is_evaluation(columns) and columns["step"] == after_step
            if columns["step"] <= after_step and not is_repeated:
                kept.write(line if line.endswith(b"\n") else line + b"\n")
                note(columns)
    if damaged:
        logger.warning(
            "%s was damaged: %d lines that cannot be read are left out, the first of them was line %d",
            path,
            len(damaged),
            damaged[0],
        )


def cut_ranks(folder: Path, rank: int, world_size: int, after_step: int) -> Path:
    """Make a folder with a file of lines for each rank, and cut that of this one.

    Args:
        folder: of the files.
        rank: of this process.
        world_size: processes of the run; what ranks beyond it wrote earlier is cut by rank 0.
        after_step: the last step whose lines stay.

    Returns:
        The path of this rank's file.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        written = [path for path in folder.iterdir() if _RANK.fullmatch(path.name)]
    own = folder / f"rank-{rank:05d}.jsonl"
    others = [path for path in written if int(path.stem[5:]) >= world_size] if rank == 0 else []
    for path in (own, *others):
        cut(path, after_step)
    return own
