"""Runs the files that take longest first, and says at the start how long all of them take here.

seconds.json keeps what each file took once: pytest --record-seconds writes it anew.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
RECORD = TESTS / "seconds.json"
_OF_A_NEW_FILE = 5.0


def _measure_speed() -> float:
    """Return how many seconds this process needs for a little work."""
    begin = time.process_time()
    for _ in range(20):
        sum(number * number for number in range(10_000))
    return time.process_time() - begin


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix(f"{TESTS.name}/")


class Timing:
    """Adds up what the tests of each file take."""

    def __init__(self, *, is_recorded: bool) -> None:
        self.is_recorded = is_recorded
        self.seconds: Counter[str] = Counter()
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {"speed": 1.0, "files": {}}
        self.speed, self.files = known["speed"], known["files"]

    def pytest_report_header(self, config: pytest.Config) -> str | None:
        """Say how long it takes where all of it runs."""
        if config.args != config.getini("testpaths") or not self.files:
            return None
        at_once = min(config.getoption("numprocesses", None) or 1, os.cpu_count() or 1)
        minutes = sum(self.files.values()) / at_once * _measure_speed() / self.speed / 60
        return (
            f"{len(self.files)} files of tests take about {minutes:.0f} minutes here, "
            "if the machine has nothing else to do"
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let the files that take longest begin first, so that in the end no worker is alone with one."""
        items.sort(key=lambda item: -self.files.get(_file_of(item.nodeid), _OF_A_NEW_FILE))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test."""
        self.seconds[_file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write what the files took, of all workers."""
        if self.is_recorded and not hasattr(session.config, "workerinput"):
            files = {name: round(seconds, 1) for name, seconds in sorted(self.seconds.items())}
            RECORD.write_text(json.dumps({"speed": _measure_speed(), "files": files}, indent=1) + "\n")
