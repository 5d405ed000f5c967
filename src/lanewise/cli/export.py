"""`lanewise export RUN_OR_CHECKPOINT --output FILE`."""

import os

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.errors import CheckpointError, ConfigError
from lanewise.runs.dir import RunDir

_SOURCE = Argument(
    "RUN_OR_CHECKPOINT",
    "the run_dir of a run, for its newest good checkpoint; or a checkpoint",
    read=read_path,
)
_OUTPUT = Argument("--output", "what to write, such as model.safetensors", "FILE", read_path)
_MODULE = Argument[str](
    "--module", "only this part of the model, such as teacher, under its own names", "NAME", default=""
)


def export(arguments: Arguments) -> int:
    """Write the weights of a checkpoint."""
    import torch

    from lanewise.runs.checkpoint.folder import CheckpointFolder, read_good
    from lanewise.runs.checkpoint.model_file import save_tensors
    from lanewise.runs.checkpoint.saver import load_state

    source, output = arguments[_SOURCE], arguments[_OUTPUT]
    if output.suffix != ".safetensors":
        raise ConfigError(
            f"--output must end in .safetensors, the format in which weights are written: got {output}."
        )
    checkpoints = CheckpointFolder(RunDir(source).checkpoints)
    if os.path.lexists(checkpoints.path):
        found = checkpoints.newest_good(warn=print)
    elif (source / "manifest.json").exists():
        found = source, read_good(source)
    else:
        raise CheckpointError(
            f"{source} is no run and no checkpoint: it has neither checkpoints nor a manifest.json. "
            "Name the run_dir of a run, or a checkpoint in one."
            if source.exists()
            else f"there is no {source}. Name the run_dir of a run, or a checkpoint in one."
        )
    if found is None:
        raise CheckpointError(f"{source} has no checkpoint yet. Its run saves the first one later.")
    folder, manifest = found
    model = load_state(folder, manifest).get("model")
    if not isinstance(model, dict):
        raise CheckpointError(
            f"{folder} has no state called model, so its weights cannot be told from others."
        )
    prefix = f"{arguments[_MODULE]}." if arguments[_MODULE] else ""
    tensors = {
        name.removeprefix(prefix): value
        for name, value in model.items()
        if name.startswith(prefix) and isinstance(value, torch.Tensor)
    }
    if not tensors:
        parts = ", ".join(sorted({name.partition(".")[0] for name in model}))
        raise ConfigError(
            f"--module {arguments[_MODULE]} has no weights in this model, whose parts are {parts}. Name one."
        )
    save_tensors(tensors, output)
    print(f"{output}: the weights after {manifest.step} steps")
    return 0


COMMAND = Command(
    name="export",
    text="Writes the weights of a checkpoint, or of a part of its model, by the names of the module.",
    run=export,
    operands=(_SOURCE,),
    options=(_OUTPUT, _MODULE),
)
