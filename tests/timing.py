"""Runs the slowest files first, and says how long all takes, what was skipped and what took longest.

seconds.json keeps what the tests of each file took once, and slow_seconds.json what its slow ones did:
pytest --record-seconds writes the files that ran into one of them.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import measure_speed

TESTS = Path(__file__).parent
FAST, SLOW = TESTS / "seconds.json", TESTS / "slow_seconds.json"
_OF_A_NEW_FILE = 5.0
_NUM_SLOWEST = 10
_OF_DEBIAN = re.compile(r"not installed: .*\(Debian: (.+)\)")
_OF_PYTHON = re.compile(r"not installed: \w+|could not import '\w+.*")


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix(f"{TESTS.name}/")


def how_to_run(reasons: Collection[str]) -> Iterator[str]:
    """Yield the commands that install what tests were skipped without."""
    found = [match for reason in reasons if (match := _OF_DEBIAN.fullmatch(reason))]
    if packages := sorted({name for match in found for name in match[1].split(", ")}):
        yield f"apt-get install {' '.join(packages)}"
    if any(map(_OF_PYTHON.fullmatch, reasons)):
        yield ".venv/bin/pip install -c constraints.txt -e '.[dev]'"


class Timing:
    """Adds up what the tests of each file take.

    Args:
        chosen: which tests run, as a marker expression.
        is_recorded: whether what their files take is written.
    """

    def __init__(self, chosen: str, *, is_recorded: bool) -> None:
        self.is_recorded = is_recorded
        self.record = SLOW if "slow" in chosen and "not slow" not in chosen else FAST
        self.seconds: Counter[str] = Counter()
        self.of_tests: Counter[str] = Counter()
        self.num_tests: Counter[str] = Counter()
        """Of each file that is run."""
        self.num_done: Counter[str] = Counter()
        self.known = json.loads(self.record.read_text())
        self.speed, self.files = self.known["speed"], Counter(self.known["files"])
        if "slow" not in chosen:
            self.files.update(json.loads(SLOW.read_text())["files"])

    def pytest_report_header(self, config: pytest.Config) -> str | None:
        """Say how long it takes where all of it runs."""
        if config.args != config.getini("testpaths") or not self.files:
            return None
        at_once = min(config.getoption("numprocesses", None) or 1, os.cpu_count() or 1)
        minutes = sum(self.files.values()) / at_once * measure_speed() / self.speed / 60
        return (
            f"{len(self.files)} files of tests take about {minutes:.0f} minutes here, "
            "if the machine has nothing else to do"
        )

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Let the percentage that is shown be that of the time, not of the tests."""
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if hasattr(reporter, "_get_progress_information_message"):  # else tests are counted
            reporter._get_progress_information_message = self._progress

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let the files that take longest begin first, so that in the end no worker is alone with one."""
        items.sort(key=lambda item: -self._expected(_file_of(item.nodeid)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of each file; with workers, one of them has told them already."""
        self._count([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count the tests of each file."""
        self._count(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test."""
        self.seconds[_file_of(report.nodeid)] += report.duration
        self.of_tests[report.nodeid] += report.duration
        self.num_done[_file_of(report.nodeid)] += report.when == "teardown"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was skipped and how to install what was missing, and what took longest."""
        if sum(self.num_tests.values()) <= _NUM_SLOWEST:
            return
        skipped = terminalreporter.stats.get("skipped", [])
        reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
        if reasons:
            terminalreporter.section("not run")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:4} {reason}")
        for command in how_to_run(reasons):
            terminalreporter.write_line(f"to run some of them: {command}")
        terminalreporter.section(f"slowest {_NUM_SLOWEST}")
        for nodeid, seconds in self.of_tests.most_common(_NUM_SLOWEST):
            terminalreporter.write_line(f"{seconds:6.1f} s {nodeid}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write what the files took, of all workers, on a machine as quick as the one of the table."""
        if self.is_recorded and not hasattr(session.config, "workerinput"):
            scale = self.speed / measure_speed()
            files = self.known["files"] | {name: round(s * scale, 1) for name, s in self.seconds.items()}
            there = {name: files[name] for name in sorted(files) if (TESTS / name).exists()}
            self.known.pop("note", None)  # says that the seconds are estimated
            self.record.write_text(json.dumps(self.known | {"files": there}, indent=1) + "\n")

    def _expected(self, name: str) -> float:
        return float(self.files.get(name, _OF_A_NEW_FILE))

    def _count(self, nodeids: list[str]) -> None:
        self.num_tests = Counter(map(_file_of, nodeids)) or self.num_tests

    def _progress(self) -> str:
        """Return the share of the time that is over, as far as the record knows."""
        # A file that took no time counts as its tests' share of a second, so that the end is always 100.
        whole = {name: self._expected(name) + 0.1 for name in self.num_tests}
        done = sum(seconds * self.num_done[name] / self.num_tests[name] for name, seconds in whole.items())
        return f" [{100 * done / sum(whole.values()) if whole else 100:3.0f}%]"
