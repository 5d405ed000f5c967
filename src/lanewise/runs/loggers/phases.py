"""Writes what each rank spent its time on."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

from lanewise.runs.cut import cut_ranks
from lanewise.runs.file import JsonLines


@final
class PhaseLog:
    """Appends a line for each logged step to the file of one rank, `rank-00000.jsonl`, without a collective.

    Args:
        folder: of these files, made here.
        rank: of this process.
        world_size: processes of the run.
        after_step: lines of later steps are cut off, as a run that goes on writes them again.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, *, after_step: int) -> None:
        self._lines = JsonLines(cut_ranks(folder, rank, world_size, after_step))

    def write(self, step: int, columns: Mapping[str, float]) -> None:
        """Append the numbers of this process in a logged step, and in those since the one before."""
        self._lines.write({"step": step, "time": time.time(), **columns})

    def close(self) -> None:
        """Write no more."""
        self._lines.close()
