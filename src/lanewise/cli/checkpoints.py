"""`lanewise checkpoints RUN`."""

import sys

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.cli.result import print_table
from lanewise.errors import CheckpointError, wrapped
from lanewise.runs.dir import RunDir

_RUN = Argument("RUN", "the run_dir of a run", read=read_path)


def checkpoints(arguments: Arguments) -> int:
    """List and verify the checkpoints of a run; the exit code is 1 if one is bad."""
    from rich.table import Column, Table

    from lanewise.runs.checkpoint.folder import CheckpointFolder
    from lanewise.runs.checkpoint.saver import load_state

    folder = CheckpointFolder(RunDir(arguments[_RUN]).checkpoints)
    found = list(folder.read())
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder.path}. Name the run_dir of a run.")
    right = [Column(name, justify="right") for name in ("step", "MiB", "metric")]
    table = Table(*right, "verified", box=None, pad_edge=False)
    mistakes = []
    for path, manifest in reversed(found):
        try:
            if isinstance(manifest, CheckpointError):
                raise manifest
            load_state(path, manifest, "meta")
        except CheckpointError as error:
            table.add_row(str(int(path.name.removeprefix("step-"))), "", "", "no")
            mistakes.append(str(error))
            continue
        size = sum(entry.num_bytes for entry in manifest.files) / 2**20
        metric = "" if manifest.metric is None else f"{manifest.metric:.6g}"
        table.add_row(str(manifest.step), f"{size:,.1f}", metric, "yes")
    print_table(table)
    for mistake in mistakes:
        print(wrapped(mistake, sys.stdout))
    return 1 if mistakes else 0


COMMAND = Command(
    name="checkpoints",
    text="""\
Lists the checkpoints of a run directory: their step, size and metric, and whether every file is as it was
written, and can be read.""",
    run=checkpoints,
    operands=(_RUN,),
)
