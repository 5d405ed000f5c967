"""What two runs wrote is compared as it stands, without a step and without a trace in their folders."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lanewise.commands.diff.recorded import (
    Parting,
    Record,
    SettingPair,
    compare,
)
from lanewise.errors import RunDirError

ORDER = {"class_path": "lanewise.lanes.ShuffledOrder", "init_args": {}}
LANES = [f"lane {lane}" for lane in range(4)]
SEQUENTIAL = {"class_path": "lanewise.lanes.SequentialOrder", "init_args": {}}


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
        "dataset": {"num_samples": 22, "samples_digest": "d", "drop_last": False, "order": ORDER, **dataset},
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


def test_a_folder_without_a_start_is_no_run(tmp_path):
    with pytest.raises(RunDirError, match="there is no run in"):
        Record(tmp_path)


def test_equal_starts_differ_in_nothing(tmp_path):
    a, b = run(tmp_path / "a", [start()]), run(tmp_path / "b", [start()])
    assert compare(a, b, 9)[0] == []
    assert compare(a, b, 9)[1] == Parting(9, None)


def test_a_setting_of_a_later_start_differs_from_its_first_step_on(tmp_path):
    """The start at step 7 failed in it, and the next one took it again with another rate."""
    a = run(tmp_path / "a", [start()])
    b = run(tmp_path / "b", [start(), start(7, lr=0.5), {"event": "end"}, start(7, lr=0.2)])
    found = compare(a, b, 9)[0]
    assert found == [SettingPair("config.optimizer.init_args.lr", (0.1, 0.2), 7, 9)]
    assert compare(a, b, 6)[0] == []


def test_sources_versions_data_and_devices_are_compared_too(tmp_path):
    other = start(samples_digest="e") | {
        "sources": {"task": "5b", "model": "6"},
        "versions": {"torch": "2.12.0"},
        "devices": {"cpu": 2},
    }
    found = compare(run(tmp_path / "a", [start()]), run(tmp_path / "b", [other]), 9)[0]
    assert [(one.name, *one.values) for one in found] == [
        ("sources.task", "5a", "5b"),
        ("versions.torch", "2.13.0", "2.12.0"),
        ("dataset.samples_digest", "d", "e"),
        ("devices.cpu", 1, 2),
        ("sources.model", None, "6"),
    ]


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        ([start()], [start(seed=1)], Parting(0, 1, LANES)),
        ([start()], [start(), start(5, seed=1)], Parting(4, 5, LANES)),
        # The third step of an epoch has 22 - 2 * 8 samples, or 20 - 2 * 8: lane 2 alone loses its share.
        ([start(order=SEQUENTIAL)], [start(order=SEQUENTIAL, num_samples=20)], Parting(2, 3, ["lane 2"])),
        ([start()], [start(order={"class_path": "own.Order", "init_args": {}}, seed=1)], Parting(0, None)),
        (
            [start()],
            [start(order={"class_path": "lanewise.lanes.BucketedOrder", "init_args": {}})],
            Parting(0, None),
        ),
    ],
    ids=["seed", "seed of a later start", "length", "an order of the user's", "a table that is not kept"],
)
def test_samples_part_where_the_orders_do(tmp_path, mine, theirs, found):
    assert compare(run(tmp_path / "a", mine), run(tmp_path / "b", theirs), 9)[1] == found


def test_times_are_not_compared_and_digests_by_tensor(tmp_path):
    a = [line(2, 1.0), digests(2, w="1", b="1"), line(4, 0.5), digests(4, w="2", b="2"), line(6, 0.1)]
    b = [line(2, 1.0, time=7.0), digests(2, w="1", b="1"), line(4, 0.5), digests(4, w="2", b="3")]
    records = run(tmp_path / "a", [start()], a), run(tmp_path / "b", [start()], b)
    of_digests, metrics = compare(*records, 9)[2:]
    assert (of_digests.last_equal, of_digests.first_unequal, of_digests.names) == (2, 4, ["b"])
    assert (metrics.last_equal, metrics.first_unequal) == (4, None)


def test_a_mean_over_other_steps_is_not_compared(tmp_path):
    """Lines after every second and every third step: the losses of step 6 are means over 2 and 3 steps."""
    a = run(tmp_path / "a", [start()], [line(2, 1.0), line(4, 0.9), line(6, 0.8)])
    b = run(tmp_path / "b", [start()], [line(3, 1.1), line(6, 0.7)])
    assert compare(a, b, 9)[3].last_equal == 6
    c = run(tmp_path / "c", [start()], [line(3, 1.1), line(6, 0.7, **{"train/learning_rate": 0.2})])
    assert compare(a, c, 9)[3].names == ["train/learning_rate"]


def test_an_evaluation_is_compared_by_what_both_have(tmp_path):
    evaluation = {"epoch": 1, "step": 4, "held_out/loss": 1.0}
    a = run(tmp_path / "a", [start()], [line(4, 1.0), evaluation])
    b = run(tmp_path / "b", [start()], [line(4, 1.0), {**evaluation, "more/loss": 2.0}])
    c = run(tmp_path / "c", [start()], [line(4, 1.0), {**evaluation, "held_out/loss": 2.0}])
    assert compare(a, b, 9)[3].first_unequal is None
    assert compare(a, c, 9)[3].names == ["held_out/loss"]


def test_a_line_that_is_being_written_does_not_count(tmp_path):
    a, b = run(tmp_path / "a", [start()]), run(tmp_path / "b", [start()])
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "step": 1')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert compare(a, Record(b.run_dir.path), 9)[3].last_equal == 9
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
