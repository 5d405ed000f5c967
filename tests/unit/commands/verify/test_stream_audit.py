"""The audit of a stream: runs as they should be, also after a kill, and lines that were doctored."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lanewise.commands.verify.audit import Audit, AuditReport
from lanewise.data import LaneBatch, StreamCut, StreamLoader, StreamReader
from lanewise.data.audit import AuditLog
from lanewise.errors import CheckpointError
from lanewise.lanes import lane_ranges

NUM_LANES, SIZE = 4, 2
LENGTHS = (9, 4, 0, 6)


class Lanes:
    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[torch.Tensor]:
        for number in range(LENGTHS[lane]):
            yield torch.tensor([epoch, lane, number])


class Plain:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(21))


def write(
    folder: Path,
    stream: Any,
    last_step: int,
    *,
    world_size: int = 1,
    first_step: int = 0,
    shuffle_buffer: int = 0,
    drop_last: bool = False,
) -> None:
    """Write the audit of steps `first_step` to `last_step - 1`, as so many processes do."""
    cut = StreamCut.of(NUM_LANES, SIZE, shuffle_buffer)
    ranges = lane_ranges(NUM_LANES, world_size)
    steps: list[list[LaneBatch]] = []
    reader = StreamReader(stream, torch.stack, 0, cut, range(NUM_LANES))
    loader = StreamLoader(reader, lambda value: [value], drop_last=drop_last)
    for step in range(last_step):
        batches: list[LaneBatch] = []
        for batch in loader.batches(step, step + 1):
            batches.append(batch)
            if batch.to_source is not None:
                break
        to_source = batches[-1].to_source
        of_ranks = [[one for one in batches if one.turn.lane in lanes] for lanes in ranges]
        for of_rank, lanes in zip(of_ranks, ranges, strict=True):
            if of_rank:
                of_rank[-1].to_source = to_source._replace(
                    numbers=to_source.numbers[lanes.start : lanes.stop]
                )
        steps.append([one for of_rank in of_ranks for one in of_rank])
        to_source.receive(to_source.numbers)
    kind = "lane-aware" if reader.is_lane_aware else "plain"
    plan = {"stream": kind, **cut._asdict(), "drop_last": drop_last, "seed": 0}
    for rank, lanes in enumerate(ranges):
        log = AuditLog(folder, rank, world_size, first_step, plan, {})
        own = [one for step in steps[first_step:] for one in step if one.turn.lane in lanes]
        assert list(log.record(iter(own))) == own


def check(folder: Path) -> AuditReport:
    report = Audit(folder).check()
    assert report.is_of_stream
    return report


def doctor(folder: Path, step: int, lane: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the line of a lane in a step; leave it out where the change returns None."""
    for path in folder.glob("rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        is_meant = [(line["step"], line["lane"]) == (step, lane) for line in lines]
        changed = [change(line) if meant else line for line, meant in zip(lines, is_meant, strict=True)]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in changed if line is not None))


CASES = [
    (stream, shuffle_buffer, drop_last)
    for stream in (Lanes(), Plain())
    for shuffle_buffer in (0, 4, 1000)
    for drop_last in (False, True)
    if not (drop_last and isinstance(stream, Lanes))  # one of its lanes is empty
]


@pytest.mark.parametrize(("stream", "shuffle_buffer", "drop_last"), CASES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_left_after_any_step_and_resumed_on_others_is_good(
    tmp_path, stream, shuffle_buffer, drop_last, world_size
):
    options = {"shuffle_buffer": shuffle_buffer, "drop_last": drop_last}
    for number in range(1, 8):
        folder = tmp_path / str(number)
        write(folder, stream, number, world_size=world_size, **options)
        assert (check(folder).problems, check(folder).notes) == ([], [])
        write(folder, stream, 11, first_step=number - 1, world_size=2, **options)
        report = check(folder)
        assert (report.problems, report.notes, report.num_steps) == ([], [], 11)
        assert report.num_epochs == (2 if isinstance(stream, Lanes) else 5 if drop_last else 3)


@pytest.mark.parametrize(("stream", "shuffle_buffer", "drop_last"), CASES)
def test_a_run_that_was_audited_from_some_step_on_is_good(tmp_path, stream, shuffle_buffer, drop_last):
    for first_step in range(1, 6):
        folder = tmp_path / str(first_step)
        write(folder, stream, 9, first_step=first_step, shuffle_buffer=shuffle_buffer, drop_last=drop_last)
        assert check(folder).problems == []


@pytest.mark.parametrize("stream", [Lanes(), Plain()])
def test_a_step_in_which_the_run_was_killed_is_noted(tmp_path, stream):
    write(tmp_path, stream, 3, world_size=2)
    path = tmp_path / "rank-00000.jsonl"
    path.write_text(path.read_text()[:-20])
    report = check(tmp_path)
    assert (report.problems, report.notes) == (
        [],
        ["step 3 is not complete: the run was stopped in it"],
    )


@pytest.mark.parametrize("shuffle_buffer", [0, 4])
def test_a_number_that_is_missing_is_named_with_its_lane(tmp_path, shuffle_buffer):
    write(tmp_path, Lanes(), 7, world_size=2, shuffle_buffer=shuffle_buffer)
    found = []

    def leave_out(line: dict[str, Any]) -> dict[str, Any]:
        found.append(line["indices"].pop(0))
        return line

    doctor(tmp_path, 2, 3, leave_out)
    assert check(tmp_path).problems == [f"epoch 1, lane 3: sample {found[0]} never came (1 left out)"]


def test_a_number_of_a_plain_stream_that_is_missing_is_named(tmp_path):
    write(tmp_path, Plain(), 4, world_size=2)
    doctor(tmp_path, 2, 1, lambda line: {**line, "indices": []})
    assert check(tmp_path).problems == ["epoch 1: sample 10 to 11 never came (2 left out)"]


def test_a_number_that_came_twice_is_named_with_its_lane(tmp_path):
    write(tmp_path, Lanes(), 7)
    doctor(tmp_path, 3, 0, lambda line: {**line, "indices": [4, 5, 5]})
    assert check(tmp_path).problems == ["epoch 1, lane 0: sample 5 came 2 times"]


@pytest.mark.parametrize("stream", [Lanes(), Plain()])
def test_a_lane_that_went_on_as_if_nothing_had_been_trained_is_named(tmp_path, stream):
    write(tmp_path, stream, 3)
    path = tmp_path / "rank-00000.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    doctor(tmp_path, 2, 0, lambda line: {**line, "indices": first["indices"]})
    problems = check(tmp_path).problems
    assert problems[0] == (
        "step 2, lane 0: trained on samples [0, 1] of epoch 1, which belong to another step or lane "
        "(rank-00000)"
    )
    place = "epoch 1, lane 0" if isinstance(stream, Lanes) else "epoch 1"
    assert f"{place}: sample 0 came 2 times" in problems


def test_a_lane_that_was_left_out_of_a_step_is_named(tmp_path):
    write(tmp_path, Lanes(), 5, world_size=2)
    doctor(tmp_path, 2, 3, lambda _: None)
    problems = check(tmp_path).problems
    assert problems == [
        "step 2, lane 3: nothing was trained",
        "epoch 1, lane 3: sample 2 to 3 never came (2 left out)",
    ]


def test_a_line_that_was_written_twice_is_named(tmp_path):
    write(tmp_path, Lanes(), 5)
    path = tmp_path / "rank-00000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    assert check(tmp_path).problems == ["step 1, lane 0: trained 2 times (rank-00000, rank-00000)"]


def test_two_runs_of_a_stream_are_compared_by_their_tensors(tmp_path):
    write(tmp_path / "one", Lanes(), 5, world_size=3)
    write(tmp_path / "other", Lanes(), 5)
    one, other = Audit(tmp_path / "one"), Audit(tmp_path / "other")
    assert list(one.compare(other)) == []
    doctor(tmp_path / "other", 2, 1, lambda line: {**line, "tensors": "0"})
    assert list(one.compare(Audit(tmp_path / "other"))) == ["step 2, lane 1: the tensors differ"]


@pytest.mark.parametrize("change", [{"num_lanes": 0}, {"num_lanes": 2**40}, {"micro_batch_size": "x"}])
def test_a_plan_that_makes_no_sense_is_an_error(tmp_path, change):
    write(tmp_path, Lanes(), 2)
    path = tmp_path / "plan.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"plan\.jsonl"):
        Audit(tmp_path)


def test_numbers_that_are_far_off_take_no_time(tmp_path):
    write(tmp_path, Lanes(), 5)
    doctor(tmp_path, 2, 1, lambda line: {**line, "indices": [2, 10**15]})
    assert check(tmp_path).problems[1:] == [
        f"epoch 1, lane 1: sample 3 to {10**15 - 1} never came ({10**15 - 3} left out)"
    ]
