"""`lanewise checkpoints RUN`."""

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.errors import CheckpointError
from lanewise.run_dir import RunDir

_RUN = Argument("RUN", "the run_dir of a run", read=read_path)


def checkpoints(arguments: Arguments) -> int:
    """List and verify the checkpoints of a run; the exit code is 1 if one is bad."""
    from rich.console import Console
    from rich.table import Column, Table

    from lanewise.checkpoint.folder import CheckpointFolder

    folder = CheckpointFolder(RunDir(arguments[_RUN]).checkpoints)
    found = list(folder.read())
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder.path}. Name the run_dir of a run.")
    right = [Column(name, justify="right") for name in ("step", "MiB", "metric")]
    table = Table(*right, "verified", box=None, pad_edge=False)
    mistakes = []
    for path, manifest in reversed(found):
        if isinstance(manifest, CheckpointError):
            table.add_row(str(int(path.name.removeprefix("step-"))), "", "", "no")
            mistakes.append(str(manifest))
            continue
        size = sum(entry.num_bytes for entry in manifest.files) / 2**20
        metric = "" if manifest.metric is None else f"{manifest.metric:.6g}"
        table.add_row(str(manifest.step), f"{size:,.1f}", metric, "yes")
    console = Console(markup=False, highlight=False)
    console.print(table)
    for mistake in mistakes:
        console.print(mistake, soft_wrap=not console.is_terminal)
    return 1 if mistakes else 0


COMMAND = Command(
    name="checkpoints",
    text="""\
Lists the checkpoints of a run directory: their step, size and metric, and whether every file is as it was
written.""",
    run=checkpoints,
    operands=(_RUN,),
)
