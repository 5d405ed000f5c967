"""What a run wrote after the step from which it goes on is removed; what cannot be read is counted."""

import json

import pytest

from lanewise.runs.cut import cut, cut_ranks


def write(path, *steps):
    path.write_text("".join(json.dumps({"step": step, "train/learning_rate": 0.1}) + "\n" for step in steps))


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_later_lines_and_an_unfinished_one_are_removed(tmp_path, caplog):
    path = tmp_path / "lines.jsonl"
    write(path, 1, 2, 3)
    with path.open("a") as file:
        file.write('{"step": 2, "trai')
    cut(path, 2)
    assert steps_of(path) == [1, 2]
    assert not caplog.records


def test_damaged_lines_are_counted(tmp_path, caplog):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": true}\n{"step": 2}\n')
    cut(path, 2)
    assert steps_of(path) == [1, 2]
    assert "2 lines that cannot be read are left out, the first of them was line 2" in caplog.text


def test_an_evaluation_that_runs_again_is_removed(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 2, "train/learning_rate": 0.1}\n{"step": 2, "held_out/loss": 1.0}\n')
    cut(path, 2, evaluates_first=True)
    assert "held_out" not in path.read_text()
    assert steps_of(path) == [2]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_cuts_what_ranks_wrote_that_are_not_there_any_more(tmp_path, rank):
    folder = tmp_path / "audit"
    folder.mkdir()
    for number in (0, 1, 2):
        write(folder / f"rank-{number:05d}.jsonl", 1, 2, 3)
    assert cut_ranks(folder, rank, 2, 1) == folder / f"rank-{rank:05d}.jsonl"
    assert [len(steps_of(path)) for path in sorted(folder.iterdir())] == (
        [1, 3, 1] if rank == 0 else [3, 1, 3]
    )
