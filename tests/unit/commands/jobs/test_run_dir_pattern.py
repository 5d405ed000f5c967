"""What `{time}` and `{number}` in train.run_dir stand for."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lanewise.commands.jobs.run_dir_pattern import find_or_make, is_pattern
from lanewise.config import TrainConfig
from lanewise.config.check import read_section
from lanewise.errors import ConfigError, RunDirError
from lanewise.runs.dir import RunDir


def hold_run(path: str) -> None:
    RunDir(Path(path)).record.write_text("{}\n")


@pytest.mark.parametrize(
    ("run_dir", "expected"), [("runs/a", False), ("a-{time}", True), ("a-{number}", True)]
)
def test_a_pattern_has_a_placeholder(run_dir, expected):
    assert is_pattern(run_dir) == expected


@pytest.mark.parametrize("name", ["a-{number}", "a-{time}", "a[1]-{number}.run"])
def test_each_run_has_a_folder_of_its_own_also_those_that_begin_together(tmp_path, name):
    pattern = str(tmp_path / "runs" / name)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: find_or_make(pattern, newest=False), range(16)))
    assert len(set(made)) == 16
    assert all(Path(path).is_dir() for path in made)


def test_time_is_the_local_time(tmp_path):
    made = find_or_make(str(tmp_path / "digits-{time}"), newest=False)
    assert re.fullmatch(r"digits-20\d{6}-\d{6}", Path(made).name)


def test_numbers_go_on_after_the_greatest_one_whatever_else_is_there(tmp_path):
    for name in ("a-2", "a-10", "a-x", "a-3-old", "b-20"):
        (tmp_path / name).mkdir()
    assert Path(find_or_make(str(tmp_path / "a-{number}"), newest=False)).name == "a-11"


def test_going_on_takes_the_newest_that_holds_a_run(tmp_path):
    """By its number, where 10 comes after 9; a start that failed before its run leaves an empty folder."""
    pattern = str(tmp_path / "a-{number}")
    for _ in range(11):
        hold_run(find_or_make(pattern, newest=False))
    find_or_make(pattern, newest=False)
    assert Path(find_or_make(pattern, newest=True)).name == "a-11"


def test_where_there_is_no_run_going_on_begins_one(tmp_path):
    assert Path(find_or_make(str(tmp_path / "a-{number}"), newest=True)).name == "a-1"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"run_dir .*file/a-1 cannot be written: .*Not a directory"):
        find_or_make(str(tmp_path / "file" / "a-{number}"), newest=False)


@pytest.mark.parametrize("run_dir", ["a-{date}", "{time}/a", "a-{time}-{number}", "a-{}"])
def test_anything_else_in_braces_is_a_mistake(run_dir):
    with pytest.raises(ConfigError) as caught:
        read_section(TrainConfig, {"run_dir": run_dir, "max_steps": 1})
    assert str(caught.value).endswith(
        f"may have {{time}} or {{number}} in its last part, once: got {run_dir}. "
        "Write one of them there, or a path without braces."
    )
