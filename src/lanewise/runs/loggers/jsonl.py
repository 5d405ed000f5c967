"""Writes metrics.jsonl, an object for each logged step and each evaluation, and media.jsonl likewise."""

import logging
import math
import os
import re
import time
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import final

from lanewise.runs.callback import LineCallback
from lanewise.runs.dir import RunDir
from lanewise.runs.file import JsonLines, json_object, open_regular, replacing, writing
from lanewise.runs.media import Media

logger = logging.getLogger(__name__)

_RANK = re.compile(r"rank-[0-9]{5,9}\.jsonl")

_MAX_LINE = 16 * 2**20
"""The most bytes of a line of a file that may be anything; norms of 100,000 parameters take about as much."""


@final
class JsonlLogger(LineCallback):
    """Appends a line for each logged step; a number that JSON lacks (NaN, infinity) becomes null.

    Its `time` is in seconds since the epoch, as in TensorBoard's events, since differences are what counts.

    Args:
        path: the file, made with the first line, so that a run that fails before has none.
        after_step: lines of later steps are cut off, as a run that goes on writes them again.
        evaluates_first: whether it also evaluates again after this step.
    """

    def __init__(self, path: Path, after_step: int = 0, *, evaluates_first: bool = False) -> None:
        media = RunDir(path.parent).media
        self._lines, self._media = JsonLines(path), JsonLines(media)
        cut(path, after_step, evaluates_first=evaluates_first)
        cut(media, after_step - 1)  # a start shows the model first

    def on_line(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """See `LineCallback`."""
        self._lines.write(columns_of(epoch, step, values))

    def on_media(self, epoch: int, step: int, media: Media) -> None:
        """See `Callback`."""
        shown = {"png": b64encode(media.png).decode()} if media.png else {"text": media.text}
        self._media.write({"epoch": epoch, "step": step, "time": time.time(), "name": media.name, **shown})

    def on_end(self, error: BaseException | None) -> None:
        """See `Callback`."""
        self._lines.close()
        self._media.close()


def columns_of(epoch: int, step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return what a line has."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {"epoch": epoch, "step": step, "time": time.time(), **finite}


def cut(path: Path, after_step: int, *, evaluates_first: bool = False) -> None:
    """Remove the lines of the steps after one, and those that are damaged, which a warning counts.

    An unfinished last line, of a killed run, is removed without a warning.

    Args:
        path: a file of lines, each with its step; it need not be there.
        after_step: the last step whose lines stay.
        evaluates_first: whether to remove the evaluation after this step as well.
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
            is_evaluation = not columns.keys() & {"train/learning_rate", "data/skipped_samples"}
            is_repeated = evaluates_first and is_evaluation and columns["step"] == after_step
            if columns["step"] <= after_step and not is_repeated:
                kept.write(line if line.endswith(b"\n") else line + b"\n")
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
