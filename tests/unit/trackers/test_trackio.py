"""What is asked of trackio."""

from typing import Any

from lanewise.trackers import Trackio
from tests.unit.trackers.services import end, send, stand_in, start


class Service:
    """A database of trackio: the lines of each run, by its name."""

    def __init__(self) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}

    def init(self, project: str, name: str, **_: Any) -> "Service":
        self.name = name
        self.runs.setdefault(name, [])
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.runs[self.name].append({**values, "step": step})

    def get_logs(self, project: str, name: str) -> list[dict[str, Any]]:
        return self.runs[name]

    def finish(self) -> None:
        """Do nothing."""


def test_a_run_has_the_name_of_its_folder_and_of_its_id_and_goes_on_after_its_last_line(
    tmp_path, monkeypatch
):
    service = Service()
    stand_in(monkeypatch, "trackio", init=service.init, finish=service.finish)
    stand_in(monkeypatch, "trackio.sqlite_storage", SQLiteStorage=service)
    tracker = Trackio()
    assert start(tracker, tmp_path) == 0
    send(tracker, 1, 2)
    end(tracker)
    assert start(Trackio(), tmp_path) == 2
    assert service.runs == {
        f"{tmp_path.name}-01234567": [
            {"epoch": 1, "lanewise/line": 1, "train/loss": 0.5, "step": 10},
            {"epoch": 1, "lanewise/line": 2, "train/loss": 0.5, "step": 20},
            {"lanewise/model_sha256": "ab" * 32, "step": 20},
        ]
    }
