"""Writes the numbers of a run to a CSV file."""

import csv
from typing import ClassVar, final

from lanewise.runs.callback import RunStart
from lanewise.runs.file import replacing
from lanewise.trackers.tracker import End, Line, Tracker


@final
class CSV(Tracker):
    """Writes `metrics.csv` to the run directory: a row for a line of metrics.jsonl, a column for a name.

    The file is written when the run ends; one that is killed has it after the next start.
    """

    file_name: ClassVar[str] = "metrics.csv"

    def open(self, start: RunStart) -> int:
        """The whole file is written anew."""
        self._path = start.run_dir / self.file_name
        self._lines: list[Line] = []
        return 0

    def send(self, line: Line) -> None:
        self._lines.append(line)

    def close(self, end: End) -> None:
        names = dict.fromkeys(name for line in self._lines for name in line.values)
        with replacing(self._path) as new, new.open("x", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["epoch", "step", "time", *names])
            writer.writeheader()
            for line in self._lines:
                place = {"epoch": line.epoch, "step": line.step, "time": line.seconds}
                writer.writerow({**place, **line.values})
