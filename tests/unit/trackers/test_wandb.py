"""What is asked of Weights & Biases, and what offline starts leave for each other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lanewise.trackers import WandB
from tests.unit.trackers.services import end, send, stand_in, start


class Run(SimpleNamespace):
    """A run of W&B."""

    def define_metric(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values["step"]))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch) -> list[Run]:
    """The runs that were begun; the service has ten lines of each that is not offline."""
    begun: list[Run] = []

    def init(id: str, dir: Path, mode: str | None, **given: Any) -> Run:  # noqa: A002 - W&B's names
        files = dir / "wandb" / f"offline-run-{len(begun)}-{id}" / "files"
        files.mkdir(parents=True)
        begun.append(Run(given=given, dir=files, offline=mode == "offline", step=11, logged=[], summary={}))
        return begun[-1]

    stand_in(monkeypatch, "wandb", init=init, Settings=SimpleNamespace)
    return begun


def test_an_offline_start_goes_on_after_the_last_line_of_those_that_were_closed(tmp_path, runs):
    tracker = WandB(offline=True)
    assert start(tracker, tmp_path) == 0
    send(tracker, 1, 2)
    end(tracker)
    assert start(tracker, tmp_path) == 2
    send(tracker, 3)  # it is killed: its folder may lack its end
    assert start(tracker, tmp_path) == 2
    assert sorted(path.name[:13] for path in (tmp_path / "wandb").iterdir()) == [
        "offline-run-0",
        "offline-run-2",
    ]
    assert [run.logged for run in runs] == [[(1, 10), (2, 20)], [(3, 30)], []]


def test_online_the_service_says_what_it_has(tmp_path, runs):
    tracker = WandB("mine")
    assert start(tracker, tmp_path) == 10
    send(tracker, 11)
    end(tracker)
    (run,) = runs
    assert (run.given["project"], run.given["name"]) == ("mine", tmp_path.name)
    assert run.summary == {"lanewise/end": "finished", "lanewise/model_sha256": "ab" * 32}
    assert run.exit_code == 0
    assert not list((tmp_path / "wandb").rglob("lanewise-*"))  # which is for those that are offline
