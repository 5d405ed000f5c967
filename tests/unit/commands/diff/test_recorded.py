"""What two runs wrote is compared as it stands, without a step and without a trace in their folders."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lanewise.commands.diff.recorded import Record, SettingPair, compare_settings
from lanewise.commands.recording.comparison import RecordingComparison, compare
from lanewise.errors import RunDirError
from tests.unit.commands.verify import test_audit


def start(first_step: int = 1, *, seed: int = 0, lr: float = 0.1, **dataset: Any) -> dict[str, Any]:
    return {
        "event": "start",
        "first_step": first_step,
        "config": {
            "train": {"seed": seed, "run_dir": f"runs/{lr}"},
            "distributed": {"equality": "exact"},
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
            "optimizer": {"init_args": {"lr": lr}},
        },
        "sources": {"task": "5a"},
        "versions": {"torch": "2.13.0"},
        "dataset": {"num_samples": 22, "samples_digest": "d", **dataset},
        "devices": {"cpu": 1},
    }


def line(step: int, loss: float, **others: Any) -> dict[str, Any]:
    timed = {"time": step * 1.5, "perf/samples_per_second": 3.0, "memory/peak_gib": 0.1}
    return {"epoch": 1, "step": step, "train/loss": loss, "train/learning_rate": 0.1, **timed, **others}


def digests(step: int, **of: str) -> dict[str, Any]:
    return {"event": "digests", "epoch": 1, "step": step, "time": 0.0, "digests": of}


def run(
    folder: Path, starts: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]] = (line(9, 1.0),)
) -> Record:
    folder.mkdir(parents=True)
    (folder / "run.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return Record(folder)


def compared(mine: Record, theirs: Record) -> RecordingComparison:
    return compare(mine.recordings(9), theirs.recordings(9), partial=["metrics"])


def test_a_folder_without_a_start_is_no_run(tmp_path):
    with pytest.raises(RunDirError, match="there is no run in"):
        Record(tmp_path)


def test_equal_starts_differ_in_nothing(tmp_path):
    a, b = run(tmp_path / "a", [start()]), run(tmp_path / "b", [start()])
    assert compare_settings(a, b, 9) == []


def test_a_setting_of_a_later_start_differs_from_its_first_step_on(tmp_path):
    """The start at step 7 failed in it, and the next one took it again with another rate."""
    a = run(tmp_path / "a", [start()])
    b = run(tmp_path / "b", [start(), start(7, lr=0.5), {"event": "end"}, start(7, lr=0.2)])
    found = compare_settings(a, b, 9)
    assert found == [SettingPair("config.optimizer.init_args.lr", (0.1, 0.2), 7)]
    assert compare_settings(a, b, 6) == []


def test_sources_versions_data_and_devices_are_compared_too(tmp_path):
    other = start(samples_digest="e") | {
        "sources": {"task": "5b", "model": "6"},
        "versions": {"torch": "2.12.0"},
        "devices": {"cpu": 2},
    }
    found = compare_settings(run(tmp_path / "a", [start()]), run(tmp_path / "b", [other]), 9)
    assert [(one.name, *one.values) for one in found] == [
        ("sources.task", "5a", "5b"),
        ("versions.torch", "2.13.0", "2.12.0"),
        ("dataset.samples_digest", "d", "e"),
        ("devices.cpu", 1, 2),
        ("sources.model", None, "6"),
    ]


def test_times_are_not_compared_and_digests_by_tensor(tmp_path):
    a = [line(2, 1.0), digests(2, w="1", b="1"), line(4, 0.5), digests(4, w="2", b="2"), line(6, 0.1)]
    b = [line(2, 1.0, time=7.0), digests(2, w="1", b="1"), line(4, 0.5), digests(4, w="2", b="3")]
    records = run(tmp_path / "a", [start()], a), run(tmp_path / "b", [start()], b)
    parts = compared(*records).parts
    of_digests = parts["digests"]
    assert (of_digests.last_equal, of_digests.first_unequal, of_digests.names) == (2, 4, ["b"])
    assert (parts["metrics"].last_equal, parts["metrics"].first_unequal) == (4, None)


def test_a_mean_over_other_steps_is_not_compared(tmp_path):
    """Lines after every second and every third step: the losses of step 6 are means over 2 and 3 steps."""
    a = run(tmp_path / "a", [start()], [line(2, 1.0), line(4, 0.9), line(6, 0.8)])
    b = run(tmp_path / "b", [start()], [line(3, 1.1), line(6, 0.7)])
    found = compared(a, b)
    assert (found.differing, found.parts["metrics"].last_equal) == ({}, 6)
    assert found.missing == {"metrics": 3, "train/loss over 2 steps": 1, "train/loss over 3 steps": 1}
    c = run(tmp_path / "c", [start()], [line(3, 1.1), line(6, 0.7, **{"train/learning_rate": 0.2})])
    assert compared(a, c).parts["metrics"].names == ["train/learning_rate"]


def test_an_evaluation_is_compared_by_what_both_have(tmp_path):
    evaluation = {"epoch": 1, "step": 4, "held_out/loss": 1.0}
    a = run(tmp_path / "a", [start()], [line(4, 1.0), evaluation])
    b = run(tmp_path / "b", [start()], [line(4, 1.0), {**evaluation, "more/loss": 2.0}])
    c = run(tmp_path / "c", [start()], [line(4, 1.0), {**evaluation, "held_out/loss": 2.0}])
    assert compared(a, b).differing == {}
    assert compared(a, b).missing == {"more/loss": 1}
    assert compared(a, c).differing["metrics"].names == ["held_out/loss"]


def test_what_an_audit_wrote_of_each_lane_is_compared(tmp_path):
    """On one and on two processes; a lane of the third run's second step got other bytes."""
    runs = [run(tmp_path / name, [start()]) for name in "abc"]
    changes = (
        test_audit.unchanged,
        test_audit.unchanged,
        test_audit.at(1, 2, lambda batch: [replace(batch, data=1)]),
    )
    for number, (one, change) in enumerate(zip(runs, changes, strict=True)):
        test_audit.write(one.run_dir.audit, 0, 3, 1 + number % 2, change)
    a, b, c = runs
    found = compared(a, b)
    assert (found.differing, found.parts["samples"].last_equal) == ({}, 3)
    assert {part: str(one) for part, one in compared(a, c).differing.items()} == {"inputs": "step 2, lane 2"}


def test_a_line_that_is_being_written_does_not_count(tmp_path):
    a, b = run(tmp_path / "a", [start()]), run(tmp_path / "b", [start()])
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "step": 1')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert compared(a, Record(b.run_dir.path)).parts["metrics"].last_equal == 9
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
