"""`lanewise runs [DIR]`."""

from pathlib import Path

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.cli.result import JSON, show_result
from lanewise.errors import RunDirError

_FOLDER = Argument[Path](
    "DIR",
    "the folder in which they are, or a run_dir; `runs` if left out",
    read=read_path,
    default=Path("runs"),
)


def runs(arguments: Arguments) -> int:
    """Show how the runs of a folder stand."""
    from lanewise.runs.report.runs import Runs
    from lanewise.runs.report.status import find_runs, read_status

    folder = arguments[_FOLDER]
    found = [read_status(path) for path in find_runs(folder)]
    if not found:
        raise RunDirError(f"there is no run in {folder}. Name the folder in which they are.")
    newest_first = sorted(found, key=lambda run: run.started or 0.0, reverse=True)
    show_result(Runs(folder, newest_first), str(folder), arguments[JSON])
    return 0


COMMAND = Command(
    name="runs",
    text="""\
Lists the runs in a folder, the newest one first: when each began, its state, its progress, its last metrics
and the best one, its error, and how to resume it. A run is running if its process holds the lock of run_dir,
or, on another host, if its last line is young.""",
    run=runs,
    operands=(_FOLDER,),
    options=(JSON,),
)
