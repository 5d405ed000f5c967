"""What each rank spent its time on, in a file of its own."""

import json
import time

import pytest

from lanewise.errors import StorageError
from lanewise.runs.loggers import PhaseLog


def write(folder, rank, world_size, after_step, *steps):
    log = PhaseLog(folder, rank, world_size, after_step=after_step)
    for step in steps:
        log.write(step, {"time/data_seconds": 0.5})
    log.close()


def steps_of(folder, rank):
    lines = (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_line_has_the_step_the_time_and_the_numbers(tmp_path):
    before = time.time()
    write(tmp_path / "phases", 3, 4, 0, 7)
    line = json.loads((tmp_path / "phases" / "rank-00003.jsonl").read_text())
    assert before <= line.pop("time") <= time.time()
    assert line == {"step": 7, "time/data_seconds": 0.5}


def test_a_run_that_goes_on_with_fewer_ranks_cuts_the_files_of_all(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, 3, 0, 1, 5, 10)
    write(tmp_path, 0, 2, 5, 10, 15)
    write(tmp_path, 1, 2, 5, 10)
    assert [steps_of(tmp_path, rank) for rank in range(3)] == [[1, 5, 10, 15], [1, 5, 10], [1, 5]]


def test_a_run_that_fails_before_its_first_step_leaves_no_file(tmp_path):
    write(tmp_path, 0, 1, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_error_that_names_the_file(small_disk):
    log = PhaseLog(small_disk, 0, 1, after_step=0)
    writes = (log.write(step, {"x" * 10**5: 0.0}) for step in range(20))
    with pytest.raises(StorageError, match=r"rank-00000\.jsonl cannot be written: No space left on device"):
        list(writes)
