"""Writes metrics.jsonl, an object for each logged step and each evaluation, and media.jsonl likewise."""

import logging
import shlex
import time
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lanewise.errors import shorten
from lanewise.runs.callback import LargestLoss, LineCallback
from lanewise.runs.cut import cut
from lanewise.runs.dir import RunDir
from lanewise.runs.file import JsonLines
from lanewise.runs.jumps import JUMP, Jumps
from lanewise.runs.media import Media

logger = logging.getLogger(__name__)


class JsonCallback(LineCallback):
    """Observes the lines of metrics.jsonl as they are written."""

    _largest: LargestLoss | None = None
    """That of the logged step which comes next."""

    @abstractmethod
    def write(self, columns: Mapping[str, Any]) -> None:
        """Write a line."""

    def on_largest_loss(self, epoch: int, step: int, largest: LargestLoss) -> None:
        self._largest = largest

    def on_line(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        largest = {} if self._largest is None else {"largest_loss": self._largest._asdict()}
        self._largest = None
        self.write({**_place(epoch, step), **values, **largest})


@final
class JsonlLogger(JsonCallback):
    """Appends a line for each logged step, and one where the loss jumped, which the console says too.

    Its `time` is in seconds since the epoch, as in TensorBoard's events, since differences are what counts.

    Args:
        path: the file, made with the first line, so that a run that fails before has none.
        after_step: lines of later steps are cut off, as a run that goes on writes them again.
        evaluates_first: whether it also evaluates again after this step.
        jumps: finds them, also among the lines that are there.
    """

    def __init__(
        self, path: Path, after_step: int = 0, *, evaluates_first: bool = False, jumps: Jumps | None = None
    ) -> None:
        media = RunDir(path.parent).media
        self._run_dir, self._jumps = path.parent, Jumps() if jumps is None else jumps
        self._lines, self._media = JsonLines(path), JsonLines(media)
        cut(path, after_step, evaluates_first=evaluates_first, note=self._jumps.find)
        cut(media, after_step - 1)  # a start shows the model first

    def write(self, columns: Mapping[str, Any]) -> None:
        self._lines.write(columns)
        if (before := self._jumps.find(columns)) is None:
            return
        loss, largest, step = columns["train/loss"], columns["largest_loss"], columns["step"]
        jump = {"loss": loss, "before": before, "largest_loss": largest}
        self._lines.write({"event": JUMP, **_place(columns["epoch"], step), **jump})
        has_lane, at = largest["lane"] is not None, largest["step"]
        logger.warning(
            "the loss jumped from %.4g to %.4g in the line of step %d. The largest was %.4g, in %sstep %d%s. "
            "To see it again: lanewise replay %s --step %d%s",
            *(before, loss, step, largest["loss"], f"lane {largest['lane']} of " * has_lane, at),
            f", samples {shorten(largest['samples'])}" * has_lane,
            *(shlex.quote(str(self._run_dir)), at, f" --lane {largest['lane']}" * has_lane),
        )

    def on_digests(self, epoch: int, step: int, digests: Mapping[str, str]) -> None:
        """See `Callback`."""
        self.write({"event": "digests", **_place(epoch, step), "digests": digests})

    def on_media(self, epoch: int, step: int, media: Media) -> None:
        shown = {"png": b64encode(media.png).decode()} if media.png else {"text": media.text}
        self._media.write({**_place(epoch, step), "name": media.name, **shown})

    def on_end(self, error: BaseException | None) -> None:
        self._lines.close()
        self._media.close()


def _place(epoch: int, step: int) -> dict[str, Any]:
    """Return how a line begins."""
    return {"epoch": epoch, "step": step, "time": time.time()}
