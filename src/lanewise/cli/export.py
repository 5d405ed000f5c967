"""`lanewise export RUN_OR_CHECKPOINT --output FILE`."""

from collections.abc import Sequence
from pathlib import Path

from lanewise.cli.option import Syntax, read_arguments
from lanewise.config.check import expand_user
from lanewise.errors import CheckpointError, ConfigError
from lanewise.run_dir import RunDir

_HELP = """\
usage: lanewise export RUN_OR_CHECKPOINT --output model.safetensors

Writes the weights of a checkpoint, of a run directory those of its newest good one, under the names of the
plain module.
"""

_SYNTAX = Syntax("export", ("RUN_OR_CHECKPOINT",), options=("--output",))


def export(arguments: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    given = read_arguments(arguments, _SYNTAX)
    if given.wants_help or not given.names:
        print(_HELP, end="")
        return 0 if given.wants_help else 2
    if "--output" not in given.options:
        raise ConfigError("export needs --output FILE: got none. Add it.")
    import torch

    from lanewise.checkpoint import CheckpointFolder, load_state, read_good, save_tensors

    source, output = Path(given.names[0]), Path(expand_user(given.options["--output"]))
    checkpoints = CheckpointFolder(RunDir(source).checkpoints)
    if checkpoints.path.is_dir():
        found = checkpoints.newest_good(warn=print)
    else:
        found = source, read_good(source)
    if found is None:
        raise CheckpointError(f"{source} has no checkpoint yet. Its run saves the first one later.")
    folder, manifest = found
    model = load_state(folder, manifest).get("model")
    if not isinstance(model, dict):
        raise CheckpointError(
            f"{folder} has no state called model, so its weights cannot be told from others."
        )
    save_tensors({name: value for name, value in model.items() if isinstance(value, torch.Tensor)}, output)
    print(f"{output}: the weights after {manifest.step} steps")
    return 0
