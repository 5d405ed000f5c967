"""A tracker gets each line of metrics.jsonl once, and never stops a run."""

import json
import logging
import threading
from pathlib import Path

import pytest

from lanewise.errors import ConfigError, PreemptedError
from lanewise.processes.watch.channel import until
from lanewise.processes.watch.heartbeat import OWN_CODE, SAVE, heartbeat
from lanewise.runs.callback import RunStart
from lanewise.runs.media import Media
from lanewise.trackers import WandB
from lanewise.trackers import tracker as module
from lanewise.trackers.tracker import End, Line, Tracker
from tests.distributed.tasks import configure

DIGEST = "fb8e20fc2e4c3f248c60c39bd652f3c1347298bb977b8b4d5903b85055620603"
"""SHA-256 of `ab`."""


class Kept(Tracker):
    """What a service has; `last` is what it remembers of an earlier start."""

    def __init__(self, last: int = 0, fails_at: int | None = None) -> None:
        super().__init__()
        self.last, self.fails_at = last, fails_at
        self.lines: list[Line] = []
        self.media: list[tuple[int, str]] = []
        self.end: End | None = None

    def open(self, start: RunStart) -> int:
        return self.last

    def send(self, line: Line) -> None:
        if line.number == self.fails_at:
            raise ConnectionError("nobody answers")
        self.lines.append(line)

    def send_media(self, line: Line, step: int, media: Media) -> None:
        self.media.append((line.number, media.name))

    def close(self, end: End) -> None:
        self.end = end


def write(run_dir: Path, *steps: int, loss: float | None = 0.5) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in steps:
            columns = {"epoch": 1, "step": step, "time": 100.0 + step, "train/loss": loss}
            file.write(json.dumps(columns) + "\n")


def start(run_dir: Path, first_step: int = 1, **options) -> RunStart:
    return RunStart(run_dir, "0123abcd", configure("unused.Task", **options), first_step, 9)


def follow(tracker: Tracker, run_dir: Path, *steps: int, error: BaseException | None = None) -> None:
    tracker.on_start(start(run_dir))
    for step in steps:
        write(run_dir, step)
        tracker.on_step(1, step, {})
    tracker.on_end(error)


def test_each_line_is_sent_once_whether_it_was_there_or_comes(tmp_path):
    write(tmp_path, 1, 2, 3)
    kept = Kept(last=1)
    follow(kept, tmp_path, 4, 5)
    assert [(line.number, line.step, line.seconds) for line in kept.lines] == [
        (number, number, 100.0 + number) for number in (2, 3, 4, 5)
    ]
    assert kept.lines[0].values == {"train/loss": 0.5}


def test_lines_that_a_killed_start_sent_and_the_next_one_writes_again_are_left_out(tmp_path):
    """It sent seven, and the checkpoint was after the fourth."""
    write(tmp_path, 1, 2, 3, 4)
    kept = Kept(last=7)
    follow(kept, tmp_path, *range(5, 10))
    assert [line.step for line in kept.lines] == [8, 9]


@pytest.mark.parametrize(("equality", "is_said"), [("close", True), ("exact", False)])
def test_a_line_says_that_numbers_may_differ_by_rounding(tmp_path, caplog, equality, is_said):
    kept = Kept(last=7)
    with caplog.at_level(logging.INFO):
        kept.on_start(start(tmp_path, first_step=5, equality=equality))
        kept.on_end(None)
    assert ("Kept keeps the 7 lines that it has" in caplog.text) == is_said


def test_null_is_sent_as_nan(tmp_path):
    write(tmp_path, 1, loss=None)
    kept = Kept()
    follow(kept, tmp_path)
    assert str(kept.lines[0].values["train/loss"]) == "nan"


@pytest.mark.parametrize(
    ("error", "has_model", "expected"),
    [
        (None, True, End("finished", DIGEST)),
        (None, False, End("finished", None)),
        (ValueError("wrong"), True, End("error", None)),
        (PreemptedError("a signal"), True, End("preempted", None)),
    ],
)
def test_the_end_is_sent_with_the_digest_of_the_model(tmp_path, error, has_model, expected):
    if has_model:
        (tmp_path / "model.safetensors").write_bytes(b"ab")
    kept = Kept()
    follow(kept, tmp_path, 1, error=error)
    assert kept.end == expected


def test_one_that_cannot_be_reached_says_so_once_and_nothing_stops(tmp_path, caplog):
    kept = Kept(fails_at=2)
    follow(kept, tmp_path, 1, 2, 3, 4)
    assert [line.step for line in kept.lines] == [1]
    assert kept.end is None
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("Kept takes no more numbers of this run: nobody answers. ")
    assert said.endswith("the next start with --resume sends what is missing.")


def test_one_that_hangs_is_not_waited_for_for_ever(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_AT_END", 0.1)
    ends = threading.Event()

    class Hanging(Kept):
        def send(self, line: Line) -> None:
            ends.wait()

    follow(Hanging(), tmp_path, 1)
    ends.set()
    assert "Hanging did not take everything in 0 s. metrics.jsonl has it" in caplog.text


def test_waiting_for_one_that_hangs_is_no_stall(tmp_path, monkeypatch):
    """The watch ends a run that makes no progress; here that could be sooner than the wait ends."""
    monkeypatch.setattr(heartbeat, "note", before := (SAVE, 3, None))
    seen = []

    class Hanging(Kept):
        def send(self, line: Line) -> None:
            seen.append(until(lambda: heartbeat.note[0] == OWN_CODE, 5.0))

    follow(Hanging(), tmp_path, 1)
    assert seen == [True]
    assert heartbeat.note is before


def test_a_package_that_is_missing_is_one_error(monkeypatch):
    monkeypatch.setattr(WandB, "package", "no_such_package")
    with pytest.raises(
        ConfigError, match=r"WandB needs the package no_such_package, .*: pip install no_such"
    ):
        WandB()


def show(run_dir: Path, step: int, name: str) -> None:
    with (run_dir / "media.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 1, "step": step, "time": 1.0, "name": name, "text": "a"}) + "\n")


def test_what_was_logged_follows_the_line_of_its_step(tmp_path):
    kept = Kept()
    kept.on_start(start(tmp_path))
    show(tmp_path, 0, "before")
    kept.on_media(0, 0, Media("before", text="a"))
    for step in (1, 2):
        write(tmp_path, step)
        kept.on_step(1, step, {})
        show(tmp_path, step, f"after {step}")
        kept.on_media(1, step, Media(f"after {step}", text="a"))
    kept.on_end(None)
    assert kept.media == [(1, "before"), (1, "after 1"), (2, "after 2")]
    assert [line.step for line in kept.lines] == [1, 2]


def test_what_a_killed_start_logged_is_sent_by_the_next_one(tmp_path):
    """It was lost: only what was logged meanwhile was sent, and an offline folder of W&B is begun anew."""
    for name in ("before", "too"):
        show(tmp_path, 0, name)
    for step in (1, 2, 3):
        write(tmp_path, step, step)  # it is evaluated, too
        show(tmp_path, step, f"after {step}")
    show(tmp_path, 7, "between lines")
    write(tmp_path, 9)
    anew, further = Kept(), Kept(last=4)
    follow(anew, tmp_path)
    follow(further, tmp_path)
    assert anew.media[:4] == [(1, "before"), (1, "too"), (2, "after 1"), (4, "after 2")]
    assert anew.media[4:] == [(6, "after 3"), (6, "between lines")]
    assert further.media == anew.media[3:]


def test_where_the_largest_loss_was_is_not_sent(tmp_path):
    """It is no number."""
    line = {"epoch": 1, "step": 1, "time": 1.0, "train/loss": 2.0, "largest_loss": {"loss": 2.0, "step": 1}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    follow(kept := Kept(), tmp_path)
    assert [line.values for line in kept.lines] == [{"train/loss": 2.0}]


def test_an_event_is_not_sent_and_has_no_number(tmp_path):
    """So that a tracker that knows the last number goes on with the next line."""
    write(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "digests", "epoch": 1, "step": 1, "time": 1.0, "digests": {}}) + "\n")
    kept = Kept()
    follow(kept, tmp_path, 2)
    assert [(line.number, line.step) for line in kept.lines] == [(1, 1), (2, 2)]
