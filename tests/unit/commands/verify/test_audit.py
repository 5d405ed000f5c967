import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lanewise.commands.verify.audit import Audit
from lanewise.data import LaneBatch
from lanewise.data.audit import AuditLog
from lanewise.errors import CheckpointError
from lanewise.lanes import (
    BucketedOrder,
    OrderInputs,
    SampleOrder,
    Schedule,
    ShuffledOrder,
    WeightedOrder,
    lane_ranges,
)

SCHEDULE = Schedule(num_samples=22, global_batch_size=8, micro_batch_size=2)
"""Three steps an epoch, the last with three lanes."""
PLAN: dict[str, Any] = {
    "num_samples": 22,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "drop_last": False,
    "order": {"class_path": "lanewise.lanes.ShuffledOrder", "init_args": {}},
    "repeats": False,
    "seed": 0,
}
SHUFFLED = ShuffledOrder(OrderInputs(SCHEDULE, 0))
Change = Callable[[LaneBatch], list[LaneBatch]]


def unchanged(batch: LaneBatch) -> list[LaneBatch]:
    return [batch]


def write(
    folder: Path,
    first_step: int,
    last_step: int,
    world_size: int,
    change: Change = unchanged,
    order: SampleOrder = SHUFFLED,
    spec: Mapping[str, Any] = PLAN["order"],
    *,
    repeats: bool = False,
) -> None:
    plan = {"order": spec, "repeats": repeats}
    for rank, lanes in enumerate(lane_ranges(4, world_size)):
        log = AuditLog(folder, rank, world_size, first_step, PLAN | plan, order.inputs.used)
        batches = []
        for turn in SCHEDULE.turns(lanes, first_step, last_step):
            indices = order.samples(turn)
            data = torch.tensor(indices)
            batches += change(LaneBatch(turn, indices, data, len(indices)))
        assert list(log.record(iter(batches))) == batches


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_run_as_planned(tmp_path, world_size):
    write(tmp_path, 0, 7, world_size)
    report = Audit(tmp_path).check()
    assert (report.problems, report.notes, report.is_good) == ([], [], True)
    assert (report.num_steps, report.num_epochs, report.num_samples) == (7, 2, 2 * 22 + 8)


def test_a_run_that_went_on_with_other_processes(tmp_path):
    write(tmp_path, 0, 5, 4)
    write(tmp_path, 3, 6, 2)  # from the checkpoint of step 3
    write(tmp_path, 6, 9, 3)
    report = Audit(tmp_path).check()
    assert (report.problems, report.notes, report.num_epochs) == ([], [], 3)


def test_a_line_that_a_kill_cut_short(tmp_path):
    write(tmp_path, 0, 4, 2)
    path = tmp_path / "rank-00001.jsonl"
    path.write_text(path.read_text()[:-20])
    report = Audit(tmp_path).check()
    assert report.is_good
    assert report.notes == ["step 4 is not complete: the run was stopped in it"]
    write(tmp_path, 3, 6, 1)
    assert Audit(tmp_path).check().notes == []


def at(step: int, lane: int, change: Change) -> Change:
    return lambda batch: change(batch) if (batch.turn.step, batch.turn.lane) == (step, lane) else [batch]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: [], "step 2, lane 2: nothing was trained"),
        (lambda batch: [batch, batch], "step 2, lane 2: trained 2 times (rank-00001, rank-00001)"),
        (
            lambda batch: [replace(batch, indices=(0, 1))],
            "step 2, lane 2: trained on samples [0, 1] instead of",
        ),
    ],
)
def test_what_is_not_as_planned_is_named(tmp_path, change, said):
    write(tmp_path, 0, 4, 2, at(1, 2, change))
    report = Audit(tmp_path).check()
    assert [problem[: len(said)] for problem in report.problems] == [said]
    assert not report.is_good


def test_equal_tensors_in_two_lanes_are_noted(tmp_path):
    write(tmp_path, 0, 1, 2, lambda batch: [replace(batch, data=torch.zeros(2))])
    report = Audit(tmp_path).check()
    assert report.is_good
    assert report.notes[0] == "step 1: lanes 0 and 1 got equal tensors for different samples"


def test_a_batch_with_fewer_rows_than_samples_is_noted(tmp_path):
    """An audit said `none left out` once where collate had left out samples."""
    write(tmp_path, 0, 4, 2, at(1, 2, lambda batch: [replace(batch, data=batch.data[:1])]))
    report = Audit(tmp_path).check()
    assert report.is_good
    assert report.notes == [
        "step 2, lane 2: collate got 2 samples and made tensors of 1 rows: it may leave samples out"
    ]


def test_rows_that_are_no_samples_are_not_noted(tmp_path):
    data = {"image": torch.zeros(2, 3), "sizes": torch.zeros(1), "scale": torch.zeros(())}
    write(tmp_path, 0, 1, 1, lambda batch: [replace(batch, data={**data, "i": batch.data})])
    assert Audit(tmp_path).check().notes == []


def test_two_runs_are_compared_by_their_tensors(tmp_path):
    write(tmp_path / "one", 0, 4, 2)
    write(tmp_path / "other", 0, 4, 3)
    write(tmp_path / "third", 0, 4, 3, at(2, 1, lambda batch: [replace(batch, data=1)]))
    one, other, third = (Audit(tmp_path / name) for name in ("one", "other", "third"))
    assert list(one.compare(other)) == []
    assert list(one.compare(third)) == ["step 3, lane 1: the tensors differ"]


def test_a_plan_that_changed_on_the_way_counts_from_there_on(tmp_path):
    write(tmp_path, 0, 3, 1)
    other: dict[str, Any] = {**PLAN, "seed": 1}
    AuditLog(tmp_path, 0, 1, 2, other, {})
    plans = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    assert [(plan["step"], plan["seed"]) for plan in plans] == [(1, 0), (3, 1)]
    assert Audit(tmp_path).check().problems == []


def test_an_order_of_lengths_is_made_again_from_what_lies_beside_the_plan(tmp_path):
    lengths = {"sample_lengths": lambda: range(22)}
    order = BucketedOrder(OrderInputs(SCHEDULE, 0, lengths), window_steps=2, max_tokens=90)
    spec = {
        "class_path": "lanewise.lanes.BucketedOrder",
        "init_args": {"window_steps": 2, "max_tokens": 90},
    }
    write(tmp_path, 0, 6, 2, order=order, spec=spec)
    report = Audit(tmp_path).check()
    assert (report.problems, report.num_epochs) == ([], 2)


def test_an_order_with_replacement_may_repeat_samples_and_says_so(tmp_path):
    weights = {"sample_weights": lambda: [1.0] * 22}
    spec = {"class_path": "lanewise.lanes.WeightedOrder", "init_args": {}}
    order = WeightedOrder(OrderInputs(SCHEDULE, 0, weights))
    write(tmp_path, 0, 3, 2, order=order, spec=spec, repeats=True)
    report = Audit(tmp_path).check()
    assert (report.problems, report.draws) == ([], True)


class Twice(ShuffledOrder):
    """An order of a user's that gives a sample twice."""

    def samples(self, turn):
        return (5,) * len(turn.positions) if turn.step == 1 and turn.lane == 2 else super().samples(turn)


@pytest.mark.parametrize(("order", "problems"), [(SHUFFLED, 0), (Twice(SHUFFLED.inputs), 1)])
def test_of_an_order_of_the_users_is_known_that_no_sample_may_come_twice(tmp_path, order, problems):
    spec = {"class_path": "somewhere.Order", "init_args": {}}
    write(tmp_path, 0, 3, 2, order=order, spec=spec)
    report = Audit(tmp_path).check()
    assert len(report.problems) == problems
    assert all(problem.startswith("epoch 1: sample 5 came ") for problem in report.problems)


def test_samples_that_could_not_be_read_are_noted(tmp_path):
    def lose_one(batch: LaneBatch) -> list[LaneBatch]:
        return [replace(batch, data=batch.data[:1], num_samples=1)]

    write(tmp_path, 0, 3, 1, at(1, 2, lose_one))
    report = Audit(tmp_path).check()
    assert report.problems == []
    assert report.notes == ["step 2, lane 2: 1 samples could not be read"]
    assert report.num_samples == 21


def test_an_audit_that_began_later_says_so(tmp_path):
    write(tmp_path, 4, 7, 2)
    report = Audit(tmp_path).check()
    assert (report.is_good, report.num_steps) == (True, 3)
    assert report.notes == ["steps before 5 were trained without --audit"]


def test_the_last_step_is_compared_unless_a_run_was_stopped_in_it(tmp_path):
    def other(batch: LaneBatch) -> list[LaneBatch]:
        return [replace(batch, data=1)]

    write(tmp_path / "one", 0, 1, 1)
    write(tmp_path / "other", 0, 1, 1, at(0, 3, other))
    audits = [Audit(tmp_path / name) for name in ("one", "other")]
    assert list(audits[0].compare(audits[0])) == []
    assert list(audits[0].compare(audits[1])) == ["step 1, lane 3: the tensors differ"]


def test_runs_that_have_nothing_in_common_are_not_equal(tmp_path):
    write(tmp_path / "one", 0, 3, 1)
    write(tmp_path / "other", 5, 7, 1)
    audits = [Audit(tmp_path / name) for name in ("one", "other")]
    assert list(audits[0].compare(audits[1])) == ["the runs have no complete step in common"]


@pytest.mark.parametrize("make", [lambda _: None, lambda folder: AuditLog(folder, 0, 1, 0, PLAN, {})])
def test_no_audit_is_an_error(tmp_path, make):
    make(tmp_path / "audit")
    with pytest.raises(CheckpointError, match=r"no audit in .*--audit|audit in .* is empty"):
        Audit(tmp_path / "audit")


def append(**fields: object) -> Callable[[Path], object]:
    """Return what adds a line with other values to a rank's file."""

    def write_line(folder: Path) -> None:
        path = folder / "rank-00000.jsonl"
        line = json.loads(path.read_text().splitlines()[-1]) | fields
        path.write_text(f"{path.read_text()}{json.dumps(line)}\n")

    return write_line


def replan(**fields: object) -> Callable[[Path], object]:
    """Return what puts other values into the plan."""
    return lambda folder: (folder / "plan.jsonl").write_text(json.dumps({"step": 1, **PLAN, **fields}))


def put(name: str, kind: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what puts something else in the place of a file."""

    def replace_file(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        kind(folder / name)

    return replace_file


BUCKETED = {"class_path": "lanewise.lanes.BucketedOrder", "init_args": {"window_steps": 2, "max_tokens": 90}}
WRONG: dict[str, Callable[[Path], object]] = {
    "no step": lambda folder: (folder / "rank-00001.jsonl").write_text("{}\n"),
    "a list": lambda folder: (folder / "rank-00001.jsonl").write_text("[1]\n"),
    "nested": lambda folder: (folder / "rank-00001.jsonl").write_text("[" * 100_000 + "\n"),
    "step": append(step="1"),
    "lane": append(lane=-1),
    "indices": append(indices=[None]),
    "skipped": append(skipped=1.5),
    "number of samples": replan(num_samples=None),
    "micro-batch": replan(micro_batch_size=0),
    "lanes": replan(num_samples=10**18, global_batch_size=10**18),
    "order": replan(order=5),
    "no order": replan(order={"class_path": "lanewise.lanes.Schedule", "init_args": {}}),
    "late": replan(step=3),
    "no plan": lambda folder: (folder / "plan.jsonl").write_text(""),
    "tables": lambda folder: (replan(order=BUCKETED)(folder), (folder / "plan-000001.npz").write_text("PK")),
    "pipe": put("rank-00000.jsonl", os.mkfifo),
    "folder": put("plan.jsonl", Path.mkdir),
    "loop": put("plan.jsonl", lambda path: path.symlink_to(path.name)),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", WRONG.values(), ids=WRONG)
def test_an_audit_of_anything_else_is_one_error(tmp_path, damage):
    write(tmp_path, 0, 3, 2)
    damage(tmp_path)
    with pytest.raises(CheckpointError):
        Audit(tmp_path).check()


@pytest.mark.timeout(20)
def test_steps_that_nobody_trained_are_one_problem(tmp_path):
    write(tmp_path, 0, 3, 2)
    append(step=10**18)(tmp_path)
    report = Audit(tmp_path).check()
    assert f"steps 4 to {10**18 - 1}: nothing was trained" in report.problems


def test_bytes_that_are_no_text_cost_their_line(tmp_path):
    write(tmp_path, 0, 3, 1)
    path = tmp_path / "rank-00000.jsonl"
    first, *later = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first.replace(b"step", b"st\xffp"), *later]))
    assert Audit(tmp_path).check().problems == ["step 1, lane 0: nothing was trained"]
