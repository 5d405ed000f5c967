"""`python -m lanewise.commands.jobs.batch FILE`: runs a job on the nodes of its batch job.

It does what the command would do inside of the allocation. Slurm starts it again when the job was put back
into the queue: by Slurm itself, which wanted the nodes for another job, or by this module, when the run was
told to save and stop. The run then goes on from its newest checkpoint.
"""

import os
import pickle
import stat
import sys
from pathlib import Path
from typing import Any

from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.outcome import Outcome
from lanewise.commands.jobs.signals import wants_stop
from lanewise.commands.jobs.start import run_command
from lanewise.errors import LanewiseError, LaunchError, PreemptedError, mistakes_of
from lanewise.launch.sbatch import ALLOCATION, run_slurm


def main() -> int:
    """Run the job of a file; return the exit code."""
    file = Path(sys.argv[1])
    outcome = Outcome(file)
    outcome.begin()
    try:
        return _run(file, outcome)
    except LanewiseError as error:
        for mistake in mistakes_of(error):
            print(f"error: {mistake}", file=sys.stderr)  # noqa: T201 - it is the log of the job
        outcome.fail(error)
        return error.exit_code


def _run(file: Path, outcome: Outcome) -> int:
    written = pickle.loads(_read_own(file))  # noqa: S301 - from our own submission
    sys.path[:] = [*written["sys.path"], *sys.path]
    job, show = pickle.loads(written["job"])  # noqa: S301 - likewise

    def keep(result: Any) -> None:
        outcome.succeed(result)
        show(result)

    try:
        run_command(job, keep)
    except PreemptedError as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is the log of the job
        outcome.succeed(error)
        _requeue(job)
        return error.exit_code
    return 0


def _read_own(file: Path) -> bytes:
    """Read a file that nobody else may have written."""
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise LaunchError(f"{file} may have been written by another user. Submit the job again.")
        return opened.read()


def _requeue(job: Job) -> None:
    """Put this batch job back into the queue if the run gets on; where Slurm ends the job, Slurm decides."""
    if wants_stop():
        return
    if job.stands_still:
        text = "the run took no step since it was stopped before, and is not put back into the queue."
        print(text, file=sys.stderr)  # noqa: T201 - it is the log of the job
        return
    run_slurm("scontrol", "requeue", os.environ[ALLOCATION])


if __name__ == "__main__":
    sys.exit(main())
