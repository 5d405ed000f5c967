"""Records some steps of a run with torch's profiler, on every rank, for Perfetto and as a table."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import final

import torch
from torch.profiler import ProfilerActivity, profile

from lanewise.engine.run.run import Run
from lanewise.engine.step.metrics import StepReport
from lanewise.errors import StorageError
from lanewise.runs.file import replace_text, writing

logger = logging.getLogger(__name__)

_NUM_OPERATORS = 40


def profiled(reports: Iterator[StepReport], run: Run, folder: Path, next_step: int) -> Iterator[StepReport]:
    """Yield the reports of a run, and profile the steps of `train.profile_steps`; see `StepProfiler`."""
    if not run.config.train.profile_steps:
        return reports
    first, last = run.config.train.profile_steps
    return StepProfiler((first, last), folder, run.world.rank, run.world.device).follow(reports, next_step)


@final
@dataclass(frozen=True)
class StepProfiler:
    """Writes a trace of some steps, `rank-00000.json.gz`, and the costliest operators, `rank-00000.txt`."""

    steps: tuple[int, int]
    """The first and the last one, from 1."""
    folder: Path
    """Where these files are; made here."""
    rank: int
    """The number of this process."""
    device: torch.device
    """Where it computes."""

    def follow(self, reports: Iterator[StepReport], next_step: int) -> Iterator[StepReport]:
        """Yield the reports of a run, and record the steps, with what is done between them.

        Args:
            reports: takes a step for each one.
            next_step: the index of the first of these.
        """
        first, end = self.steps
        if next_step + 1 > first:
            yield from reports
            return
        yield from islice(reports, first - 1 - next_step)
        activities = [ProfilerActivity.CPU]
        kind = self.device.type.upper()
        if kind != "CPU" and kind in ProfilerActivity.__members__:
            activities.append(getattr(ProfilerActivity, kind))
        last, last_step = None, 0
        with profile(activities=activities) as recorded:
            for report in reports:
                last_step = report.step + 1
                if report.step + 1 == end:
                    last = report
                    break
                yield report
        if last_step:
            self._write(recorded, last_step)
        elif self.rank == 0:
            logger.warning("nothing was profiled: the run ended before step %d", first)
        if last is not None:
            yield last
            yield from reports

    def _write(self, recorded: profile, last_step: int) -> None:
        """Write the files; a disk that takes none of them is no reason to end the run."""
        trace = self.folder / f"rank-{self.rank:05d}.json.gz"
        sort_by = "self_cpu_time_total" if self.device.type == "cpu" else "self_device_time_total"
        table = recorded.key_averages().table(sort_by=sort_by, row_limit=_NUM_OPERATORS)
        try:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                recorded.export_chrome_trace(str(trace))
            replace_text(self.folder / f"rank-{self.rank:05d}.txt", f"{table}\n")
        except StorageError as error:
            logger.warning("the profile of steps %d to %d is lost: %s", self.steps[0], last_step, error)
            return
        if self.rank == 0:
            logger.info("steps %d to %d were profiled: %s", self.steps[0], last_step, trace)
