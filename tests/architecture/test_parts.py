"""What is slow is run in turns: each file and target is in one part, which takes half an hour at most."""

import json

import pytest

from tests import part
from tests.timing import FAST, SLOW, TESTS


def test_each_file_with_slow_tests_and_each_target_is_in_one_part_of_half_an_hour():
    seconds = part.units()
    num_parts = part.fewest(seconds)
    parts = part.cut(seconds, num_parts)
    assert sorted(name for one in parts for name in one) == sorted(seconds)
    assert {*part.slow_files(), "test-device", "soak", "failures", "test-oldest"} == set(seconds)
    assert "docs/test_commands.py" in seconds
    assert max(sum(map(seconds.get, one)) for one in parts) <= 1800
    assert parts == part.cut(dict(reversed(seconds.items())), num_parts)  # on any machine the same


def test_no_part_is_longer_than_its_longest_file():
    seconds = {"a.py": 2 * part.MOST_SECONDS, "b.py": part.MOST_SECONDS, "c.py": 1.0}
    assert part.fewest(seconds) == 2
    assert part.cut(seconds, 2) == [["a.py"], ["b.py", "c.py"]]


def test_a_part_is_chosen_by_name_or_by_the_head():
    assert part.chosen("2/5", 4) == (2, 5)
    number, num_parts = part.chosen("", 4)
    assert 1 <= number <= num_parts == 4
    for wrong in ("5/4", "0/4", "4", "1/2/3"):
        with pytest.raises(SystemExit, match=r"such as 1/4"):
            part.chosen(wrong, 4)


@pytest.mark.parametrize("table", [FAST, SLOW], ids=lambda table: table.name)
def test_the_tables_of_seconds_name_files_that_are_there(table):
    assert [name for name in json.loads(table.read_text())["files"] if not (TESTS / name).exists()] == []
