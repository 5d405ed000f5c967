"""Writes metrics.jsonl, an object for each logged step and each evaluation, and media.jsonl likewise."""

import math
import time
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import final

from lanewise.runs.callback import LineCallback
from lanewise.runs.cut import cut
from lanewise.runs.dir import RunDir
from lanewise.runs.file import JsonLines
from lanewise.runs.media import Media


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
        self._lines.write(columns_of(epoch, step, values))

    def on_digests(self, epoch: int, step: int, digests: Mapping[str, str]) -> None:
        """See `Callback`."""
        place = {"epoch": epoch, "step": step, "time": time.time()}
        self._lines.write({"event": "digests", **place, "digests": digests})

    def on_media(self, epoch: int, step: int, media: Media) -> None:
        shown = {"png": b64encode(media.png).decode()} if media.png else {"text": media.text}
        self._media.write({"epoch": epoch, "step": step, "time": time.time(), "name": media.name, **shown})

    def on_end(self, error: BaseException | None) -> None:
        self._lines.close()
        self._media.close()


def columns_of(epoch: int, step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return what a line has."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {"epoch": epoch, "step": step, "time": time.time(), **finite}
