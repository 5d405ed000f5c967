"""Reads what two runs wrote, without running anything, and compares how each was started."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from lanewise.commands.recording.comparison import Recording, differing
from lanewise.commands.replay.plan import read_starts, read_written, start_of
from lanewise.config.tree import flat
from lanewise.errors import RunDirError
from lanewise.runs.dir import RunDir
from lanewise.runs.file import reading
from lanewise.runs.report.status import read_status

_PARTS = ("config", "sources", "versions", "dataset", "devices")
"""What is compared of two starts; their commits only where sources differ."""
_AS_WRITTEN = ("samples", "inputs", "digests")
"""Parts of what a run writes of a step that are compared as they are."""
_OF_A_STEP = ("train/grad_norm", "train/learning_rate")
"""Columns that are of a step, and not of all steps since the line before."""


@final
class Record:
    """What a run has written so far, also while it continues: no lock is taken, and nothing is written.

    Args:
        path: its run_dir.

    Raises:
        CheckpointError: if its record is damaged.
        RunDirError: if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        starts = read_starts(self.run_dir)
        if not any(start["first_step"] == 1 for start in starts):
            raise RunDirError(f"there is no run in {path} (run.jsonl). Name the run_dir of a run.")
        self.starts = [start for start in starts if start_of(starts, start["first_step"]) is start]
        """The starts that took steps, the first one first."""
        self.last_step = read_status(path).step or 0
        """The last step that is known, from 1."""
        with reading(self.run_dir.record):
            self.is_exact = all(
                start["config"]["distributed"]["equality"] == "exact" for start in self.starts
            )

    def recordings(self, last_step: int) -> dict[int, Recording]:
        """Return what the run wrote of the steps up to one.

        The parts are `metrics`, those of an evaluation among them, where the name of what is over several
        steps has their number; `digests`; and with `--audit` `samples` and `inputs` of each lane.
        """
        before, found = 0, dict[int, Recording]()
        for step, written in read_written(self.run_dir, 0).items():
            columns, count = written.get("metrics", {}), step - before
            before = step if columns else before
            metrics = {
                name if count == 1 or name in _OF_A_STEP else f"{name} over {count} steps": value
                for name, value in columns.items()
            }
            parts = {part: written[part] for part in _AS_WRITTEN if part in written}
            parts["metrics"] = {**metrics, **written.get("evaluation", {})}
            if step <= last_step:
                found[step] = {part: values for part, values in parts.items() if values}
        return found


@dataclass(frozen=True)
class SettingPair:
    """Something in which the starts differ that took the same step of two runs."""

    name: str
    values: tuple[Any, Any]
    """None where a run does not have it."""
    first_step: int
    """The first such step, from 1."""


def compare_settings(mine: Record, theirs: Record, last_step: int) -> list[SettingPair]:
    """Return in what the starts differ that took the steps up to one."""
    found: dict[str, SettingPair] = {}
    firsts = {start["first_step"] for record in (mine, theirs) for start in record.starts}
    for first in sorted(step for step in firsts if step <= last_step):
        starts = [start_of(record.starts, first) for record in (mine, theirs)]
        parts = _PARTS + ("git",) * (starts[0].get("sources") != starts[1].get("sources"))
        a, b = (flat({part: start[part] for part in parts if part in start}) for start in starts)
        for name in differing(a, b):
            values = a.get(name), b.get(name)
            if name != "config.train.run_dir":
                found.setdefault(repr((name, values)), SettingPair(name, values, first))
    return list(found.values())
