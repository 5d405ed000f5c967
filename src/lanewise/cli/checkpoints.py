"""`lanewise checkpoints RUN`."""

from collections.abc import Sequence
from pathlib import Path

from lanewise.cli.option import Syntax, read_arguments
from lanewise.errors import CheckpointError
from lanewise.run_dir import RunDir

_HELP = """\
usage: lanewise checkpoints RUN

Lists the checkpoints of a run directory: their step, size and metric, and whether every file is as it was
written.
"""

_SYNTAX = Syntax("checkpoints", ("RUN",))


def checkpoints(arguments: Sequence[str]) -> int:
    """Run the subcommand and return the exit code: 1 if a checkpoint is bad."""
    given = read_arguments(arguments, _SYNTAX)
    if given.wants_help or not given.names:
        print(_HELP, end="")
        return 0 if given.wants_help else 2
    from rich.console import Console
    from rich.table import Table

    from lanewise.checkpoint import CheckpointFolder

    folder = CheckpointFolder(RunDir(Path(given.names[0])).checkpoints)
    found = list(folder.read())
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder.path}. Name the run_dir of a run.")
    table = Table("step", "MiB", "metric", "verified", box=None)
    num_bad = 0
    for path, manifest in reversed(found):
        if isinstance(manifest, CheckpointError):
            num_bad += 1
            table.add_row(str(int(path.name.removeprefix("step-"))), "", "", f"no: {manifest}")
            continue
        size = sum(entry.num_bytes for entry in manifest.files) / 2**20
        metric = "" if manifest.metric is None else f"{manifest.metric:.6g}"
        table.add_row(str(manifest.step), f"{size:,.1f}", metric, "yes")
    Console(soft_wrap=True).print(table)
    return 1 if num_bad else 0
