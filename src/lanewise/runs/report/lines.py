"""Reads files of JSON lines that may be damaged or not there, and says what could not be read."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, final

from lanewise.runs.file import json_object, open_regular

_MAX_LINE = 16 * 2**20
_MOST_STEPS = 10**18


@final
class JsonLinesReader:
    """Yields the objects of a file, line by line, and notes what it left out.

    Args:
        path: the file, which may be anything.
        last_bytes: begins so many bytes before the end, at the next line; None: at the beginning.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self.problems: list[str] = []
        """What could not be read, as soon as the lines were."""
        self.is_whole = True
        """Whether it began with the first line."""
        self._last_bytes = last_bytes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        damaged: list[int] = []
        try:
            with open_regular(self.path) as file:
                self._skip(file)
                for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1):
                    columns = json_object(line)
                    if columns is not None:
                        yield columns
                    elif line.endswith(b"\n"):
                        damaged.append(number)
                    else:
                        self.problems.append(f"{self.path.name}: its last line is half-written")
        except FileNotFoundError:
            self.problems.append(f"{self.path.name} is not there")
        except OSError as error:
            self.problems.append(f"{self.path.name} cannot be read: {error.strerror}")
        if damaged:
            place = f"line {damaged[0]:,}" if self.is_whole else "near its end"
            lines = "1 line" if len(damaged) == 1 else f"{len(damaged):,} lines"
            self.problems.append(f"{self.path.name}: {lines} cannot be read, the first of them {place}")

    def _skip(self, file: BufferedReader) -> None:
        if self._last_bytes is None:
            return
        size = file.seek(0, os.SEEK_END)
        self.is_whole = size <= self._last_bytes
        file.seek(max(0, size - self._last_bytes))
        if not self.is_whole:
            file.readline()  # of which the begin is missing


def files_of_ranks(folder: Path, ending: str) -> list[tuple[int, Path]]:
    """Return the rank and the path of each file of a rank; none where the folder cannot be read."""
    name = re.compile(rf"rank-(\d{{5,9}}){re.escape(ending)}")
    with suppress(OSError):
        paths = sorted(folder.iterdir())
        return [(int(match[1]), path) for path in paths if (match := name.fullmatch(path.name))]
    return []


def count_of(value: object) -> int | None:
    """Return what may be anything as a number of steps; None where it is none that a run can have."""
    return value if type(value) is int and 0 <= value < _MOST_STEPS else None
