"""Sends the numbers of a run to Weights & Biases."""

import shutil
from dataclasses import asdict
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, final

from lanewise.runs.callback import RunStart
from lanewise.runs.media import Media
from lanewise.trackers.tracker import End, Line, Tracker, name_of

_LAST_LINE = "lanewise-last-line"
"""A file in the folder of an offline start that was closed."""


@final
class WandB(Tracker):
    """Weights & Biases (https://wandb.ai), whose `step` is the axis of every chart.

    Offline, each start of a run writes a folder `wandb/offline-run-*` in the run directory, all with the id
    of one run; `wandb sync` sends them. A killed start may have lost the end of its folder, which the next
    start therefore removes, and writes again.

    Args:
        project: of W&B.
        entity: of W&B; None: the user's own.
        name: of the run; None: that of its folder.
        offline: whether nothing is sent anywhere; also with WANDB_MODE=offline.
    """

    package: ClassVar[str] = "wandb"

    def __init__(
        self,
        project: str = "lanewise",
        entity: str | None = None,
        name: str | None = None,
        *,
        offline: bool = False,
    ) -> None:
        super().__init__()
        self._project, self._entity, self._name, self._offline = project, entity, name, offline

    def open(self, start: RunStart) -> int:
        import wandb

        last = _clean_up(start.run_dir / "wandb", start.run_id)
        self._run: Any = wandb.init(
            project=self._project,
            entity=self._entity,
            name=self._name or name_of(start),
            id=start.run_id,
            dir=start.run_dir,
            config=asdict(start.config),
            mode="offline" if self._offline else None,
            resume="allow",
            settings=wandb.Settings(console="off", quiet=True),
        )
        self._run.define_metric("*", step_metric="step")
        self._last = last if self._run.offline else max(0, self._run.step - 1)
        return self._last

    def send(self, line: Line) -> None:
        """The number of the line is what W&B calls the step."""
        self._last = line.number
        self._run.log({"epoch": line.epoch, "step": line.step, **line.values}, step=line.number)

    def send_media(self, line: Line, step: int, media: Media) -> None:
        import wandb
        from PIL import Image

        text = f"<pre>{escape(media.text or '')}</pre>"
        shown = wandb.Image(Image.open(BytesIO(media.png))) if media.png else wandb.Html(text)
        self._run.log({media.name: shown}, step=line.number)

    def close(self, end: End) -> None:
        self._run.summary["lanewise/end"] = end.reason
        if end.model_sha256 is not None:
            self._run.summary["lanewise/model_sha256"] = end.model_sha256
        self._run.finish(exit_code=0 if end.reason == "finished" else 1)
        if self._run.offline:
            folder = Path(self._run.dir).parent  # which has a folder of files
            (folder / _LAST_LINE).write_text(str(self._last), encoding="utf-8")


def _clean_up(folder: Path, run_id: str) -> int:
    """Remove what killed offline starts left, and return the last line of those that were closed."""
    last = 0
    for start in folder.glob(f"offline-run-*-{run_id}"):
        closed = start / _LAST_LINE
        if closed.exists():
            last = max(last, int(closed.read_text(encoding="utf-8")))
        else:
            shutil.rmtree(start)
    return last
