"""run.jsonl: the starts of a run, and how each ended."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lanewise.errors import LaunchError, PreemptedError, StorageError
from lanewise.runs import record as run_record
from lanewise.runs.record import RunEnd, RunRecord, end_begun


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def lines_of(path: Path) -> list[dict]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def begin(path: Path, first_step: int = 1) -> RunRecord:
    record = RunRecord(path)
    record.begin({"first_step": first_step})
    return record


def events(path: Path) -> list[str]:
    return [line.get("reason", "start") for line in lines_of(path)]


def test_a_start_and_its_end(path):
    before = datetime.now(UTC)
    record = RunRecord(path)
    run_id = record.begin({"first_step": 2, "world_size": 3})
    record.end(RunEnd("finished", 12))
    start, end = lines_of(path)
    assert before <= datetime.fromisoformat(start["time"]) <= datetime.fromisoformat(end["time"])
    assert datetime.fromisoformat(end["time"]) <= datetime.now(UTC)
    for line in (start, end):
        del line["time"]
    identifier = start["id"]
    assert start == {
        "event": "start", "run_id": run_id, "id": identifier, "first_step": 2, "world_size": 3,
    }  # fmt: skip
    assert end == {
        "event": "end", "run_id": run_id, "id": identifier, "reason": "finished", "last_step": 12,
    }  # fmt: skip


def test_a_run_keeps_its_id_and_each_start_has_its_own(path):
    ids = [RunRecord(path).begin({"first_step": step}) for step in range(3)]
    assert len(set(ids)) == 1
    assert len({line["id"] for line in lines_of(path)}) == 3


def test_whoever_comes_first_tells_the_end(path):
    watching = RunRecord(path)
    record = begin(path)
    watching.end(RunEnd("error", error="ValueError", text="of rank 3"))
    record.end(RunEnd.of_error(ConnectionResetError("a consequence")))
    watching.end(RunEnd("finished"))
    _, end = lines_of(path)
    assert (end["reason"], end["error"], end["text"]) == ("error", "ValueError", "of rank 3")


def test_of_many_threads_one_tells_the_end(path):
    begin_late = RunRecord(path)
    begin(path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda step: begin_late.end(RunEnd("finished", step)), range(50)))
    assert events(path) == ["start", "finished"]


def test_a_start_that_was_killed_before_gets_no_end(path):
    """A start that fails before it is written must not end the one before."""
    begin(path)
    RunRecord(path).end(RunEnd("error"))
    assert events(path) == ["start"]
    begin(path).end(RunEnd("finished"))
    assert events(path) == ["start", "start", "finished"]
    RunRecord(path).end(RunEnd("error"))
    assert events(path) == ["start", "start", "finished"]


def test_what_ends_a_process_ends_the_start_that_it_wrote(path, monkeypatch):
    monkeypatch.setattr(run_record, "_begun", None)
    end_begun(RunEnd("error"))
    assert not path.exists()
    begin(path)
    end_begun(RunEnd("error"))
    end_begun(RunEnd("error"))
    assert events(path) == ["start", "error"]


def test_without_a_start_there_is_no_end(path):
    RunRecord(path).end(RunEnd("error"))
    assert not path.exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PreemptedError("a signal"), RunEnd("preempted")),
        (LaunchError("rank 0 was killed"), RunEnd("error", error="LaunchError", text="rank 0 was killed")),
        (KeyboardInterrupt(), RunEnd("error", error="KeyboardInterrupt", text="")),
    ],
)
def test_the_end_that_an_error_makes(error, expected):
    assert RunEnd.of_error(error) == expected


@pytest.mark.parametrize(
    ("metrics", "first_step", "expected"),
    [
        (None, 1, None),
        (b"", 1, None),
        (b'{"step": 1}\n{"step": 7}\n', 1, 7),
        (b'{"step": 1}\n{"step": 7}\n{"step": 9, "tr', 1, 7),
        (b'{"step": 1}\n{"step": 7}\n', 8, None),
        (b'{"step": 1, "x": "' + b"x" * 2**20 + b'"}\n{"step": 3}\n', 1, 3),
        (b"damaged", 1, None),
    ],
)
def test_who_does_not_know_the_step_takes_that_of_the_last_line_of_metrics(
    path, metrics, first_step, expected
):
    if metrics is not None:
        path.with_name("metrics.jsonl").write_bytes(metrics)
    record = begin(path, first_step)
    record.end(RunEnd("error"))
    assert lines_of(path)[-1].get("last_step") == expected


@pytest.mark.parametrize("damage", [b'{"event": "e', b'{"event": "end"}', b"\xff"])
def test_a_line_that_a_killed_process_left_half_written_does_not_count(path, damage):
    record = begin(path)
    with path.open("ab") as file:
        file.write(damage)
    record.end(RunEnd("finished"))
    assert events(path) == ["start", "finished"]


@pytest.mark.parametrize(
    "damage",
    [
        b"\n",
        b"5\n",
        b"{}\n",
        b'{"event": "start"}\n',
        b"\xff\n",
        b"[" * 9**5 + b"\n",
        b'{"event": "end", "run_id": "a", "id": [1]}\n',
        b"1" * 6000 + b"\n",
        b'{"event": "start", "run_id": "a", "id": "a", "first_step": "x"}\n',
    ],
)
def test_a_damaged_line_is_left_out_and_left_there(path, damage):
    path.write_bytes(damage)
    begin(path).end(RunEnd("finished"))
    content = path.read_bytes()
    assert content.startswith(damage)
    path.write_bytes(content.removeprefix(damage))
    assert events(path) == ["start", "finished"]


def test_a_link_in_its_place_is_never_written_through(tmp_path, path):
    (tmp_path / "precious").write_text("mine")
    path.symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="it is a link"):
        RunRecord(path)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_full_disk_is_one_error_that_names_the_file(small_disk):
    record = RunRecord(small_disk / "run.jsonl")
    with pytest.raises(StorageError, match=r"run\.jsonl cannot be written: No space left on device"):
        record.begin({"first_step": 1, "config": "x" * 2**25})
