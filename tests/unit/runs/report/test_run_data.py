"""What a report says happened to a run."""

from pathlib import Path

from lanewise.runs.report.run_data import read_run
from tests.unit.runs.report.left import START, end, write_run


def said_of(run_dir: Path) -> list[tuple[str, str]]:
    return [(moment.kind, moment.text) for moment in read_run(run_dir, "mine").moments]


def test_starts_and_ends_are_told_with_their_processes_and_steps(tmp_path):
    events = [
        {**START, "world_size": 1},
        end("preempted", last_step=12),
        {**START, "time": "2026-11-25T03:36:00+00:00", "first_step": 13},
        {**end("error", text="no space left\nand more"), "time": "2026-11-25T03:37:00+00:00"},
    ]
    assert said_of(write_run(tmp_path / "run", events)) == [
        ("start", "start on 1 process, from step 1"),
        ("end", "preempted after step 12"),
        ("start", "start on 2 processes, from step 13"),
        ("end", "error: no space left"),
    ]


def test_what_has_no_time_is_left_out(tmp_path):
    assert said_of(write_run(tmp_path / "run", [{**START, "time": "yesterday"}])) == []


def test_a_checkpoint_is_told_with_its_step(tmp_path):
    run_dir = write_run(tmp_path / "run")
    (run_dir / "checkpoints" / "step-001200").mkdir(parents=True)
    assert ("checkpoint", "checkpoint after step 1,200") in said_of(run_dir)
