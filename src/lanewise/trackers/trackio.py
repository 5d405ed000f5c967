"""Sends the numbers of a run to trackio."""

from dataclasses import asdict
from typing import Any, ClassVar, final

from lanewise.runs.callback import RunStart
from lanewise.trackers.tracker import End, Line, Tracker, name_of

_LINE = "lanewise/line"


@final
class Trackio(Tracker):
    """trackio (https://github.com/gradio-app/trackio), in its database on this machine.

    `trackio show` shows it; `trackio sync` sends it to a Space.

    Args:
        project: of trackio.
        name: of the run; None: that of its folder. The first letters of the run's id follow it.
    """

    package: ClassVar[str] = "trackio"

    def __init__(self, project: str = "lanewise", name: str | None = None) -> None:
        super().__init__()
        self._project, self._name = project, name

    def open(self, start: RunStart) -> int:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{self._name or name_of(start)}-{start.run_id[:8]}"
        config = {"lanewise_run_id": start.run_id, **asdict(start.config)}
        self._run: Any = trackio.init(
            self._project,
            name,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        logs = SQLiteStorage.get_logs(self._project, name)
        return max((int(log[_LINE]) for log in logs if _LINE in log), default=0)

    def send(self, line: Line) -> None:
        self._last_step = line.step
        self._run.log({"epoch": line.epoch, _LINE: line.number, **line.values}, step=line.step)

    def close(self, end: End) -> None:
        import trackio

        if end.model_sha256 is not None:
            self._run.log({"lanewise/model_sha256": end.model_sha256}, step=self._last_step)
        trackio.finish()
