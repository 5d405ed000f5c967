"""Sends the numbers of a run to MLflow."""

import json
from dataclasses import asdict
from io import BytesIO
from typing import Any, ClassVar, final

from lanewise.config.tree import flat
from lanewise.runs.callback import RunStart
from lanewise.runs.dir import RunDir
from lanewise.runs.media import Media
from lanewise.trackers.tracker import End, Line, Tracker, name_of

_RUN_ID = "lanewise.run_id"
_LINE = "lanewise/line"
_MOST_PARAMS = 100  # in a request
_LONGEST_PARAM = 500
_STATUS = {"finished": "FINISHED", "preempted": "KILLED", "error": "FAILED"}


@final
class MLflow(Tracker):
    """MLflow (https://mlflow.org): a server, or a database of its own.

    The metric `lanewise/line` is the number of the last line of metrics.jsonl that was sent.

    Args:
        experiment: of MLflow; made if there is none of the name.
        tracking_uri: of the server or the database; None: as MLFLOW_TRACKING_URI says.
        name: of the run; None: that of its folder.
    """

    package: ClassVar[str] = "mlflow"

    def __init__(
        self, experiment: str = "lanewise", tracking_uri: str | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        self._experiment, self._tracking_uri, self._name = experiment, tracking_uri, name

    def open(self, start: RunStart) -> int:
        """A run there is found by the tag `lanewise.run_id`."""
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(self._tracking_uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        )
        found = self._client.search_runs([experiment_id], f"tags.`{_RUN_ID}` = '{start.run_id}'")
        if found:
            (run,) = found
            self._run_id = run.info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return int(run.data.metrics.get(_LINE, 0))
        tags = {_RUN_ID: start.run_id, "lanewise.run_dir": str(start.run_dir)}
        run = self._client.create_run(experiment_id, tags=tags, run_name=self._name or name_of(start))
        self._run_id = run.info.run_id
        self._send_config(start)
        return 0

    def send(self, line: Line) -> None:
        """One request, which is stored wholly or not at all."""
        from mlflow.entities import Metric

        values = {**line.values, "epoch": line.epoch, _LINE: line.number}
        milliseconds = int(1000 * line.seconds)
        metrics = [Metric(name, value, milliseconds, line.step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def send_media(self, line: Line, step: int, media: Media) -> None:
        """An artifact, which takes the place of one that was sent before."""
        from PIL import Image

        file = f"media/{media.name}/{step:06d}"
        if media.png is None:
            self._client.log_text(self._run_id, media.text or "", f"{file}.txt")
        else:
            self._client.log_image(self._run_id, Image.open(BytesIO(media.png)), f"{file}.png")

    def close(self, end: End) -> None:
        if end.model_sha256 is not None:
            self._client.set_tag(self._run_id, "lanewise.model_sha256", end.model_sha256)
        self._client.set_terminated(self._run_id, _STATUS[end.reason])

    def _send_config(self, start: RunStart) -> None:
        from mlflow.entities import Param

        params = [
            Param(key, json.dumps(value, default=str)[:_LONGEST_PARAM])
            for key, value in flat(asdict(start.config)).items()
        ]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])
        self._client.log_artifact(self._run_id, str(RunDir(start.run_dir).config))
