"""Finds the warnings and the first error of each rank in the logs of a run."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lanewise.runs.file import open_regular
from lanewise.runs.report.lines import files_of_ranks

_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) [\w.]+: (.*)")
_MOST_LINES = 60
"""The most lines of an error, with its traceback."""
_MOST_WARNINGS = 50
_MOST_BYTES = 64 * 2**20
"""How much of a log is read, from its beginning."""


@dataclass
class LogFindings:
    """What the logs of a run say of trouble."""

    warnings: Counter[str] = field(default_factory=Counter)
    """How often each was written, by all ranks."""
    errors: dict[int, str] = field(default_factory=dict)
    """The first one of each rank, with its traceback."""
    problems: list[str] = field(default_factory=list)
    """Logs that could not be read."""


def read_logs(folder: Path) -> LogFindings:
    """Read the logs of all ranks in a folder."""
    found = LogFindings()
    if not folder.is_dir():
        found.problems.append(f"{folder.name} is not there")
    for rank, path in files_of_ranks(folder, ".log"):
        try:
            with open_regular(path) as file:
                text = file.read(_MOST_BYTES).decode(errors="replace")
        except OSError as error:
            found.problems.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        for level, record in _records(text):
            if level == "WARNING" and (record in found.warnings or len(found.warnings) < _MOST_WARNINGS):
                found.warnings[record] += 1
            elif level in ("ERROR", "CRITICAL"):
                found.errors.setdefault(rank, record)
    return found


def _records(text: str) -> Iterator[tuple[str, str]]:
    """Yield level and text of each record, with the lines that follow it."""
    level, lines = "", list[str]()
    for line in text.splitlines():
        if match := _RECORD.match(line):
            yield level, "\n".join(lines)
            level, lines = match[1], [match[2]]
        elif len(lines) < _MOST_LINES:
            lines.append(line)
    yield level, "\n".join(lines)
