"""`lanewise export RUN_OR_CHECKPOINT --output FILE`."""

import os
from pathlib import Path
from typing import Any

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.errors import CheckpointError, ConfigError
from lanewise.runs.dir import RunDir

_SOURCE = Argument(
    "RUN_OR_CHECKPOINT", "the run_dir of a run; a checkpoint; or a file of weights", read=read_path
)
_WEIGHTS = Argument[str | None](
    "--weights", "as for evaluate; last are those of the newest good checkpoint", "best|last", default=None
)
_OUTPUT = Argument("--output", "what to write, such as model.safetensors", "FILE", read_path)
_MODULE = Argument[str](
    "--module", "only this part of the model, such as teacher, under its own names", "NAME", default=""
)


def export(arguments: Arguments) -> int:
    """Write the weights of a run, of a checkpoint or of a file."""
    import torch

    from lanewise.runs.checkpoint.model_file import read_model, save_tensors
    from lanewise.runs.report.weights import find_weights

    source, output = arguments[_SOURCE], arguments[_OUTPUT]
    if output.suffix != ".safetensors":
        raise ConfigError(
            f"--output must end in .safetensors, the format in which weights are written: got {output}."
        )
    if source.is_file():
        if arguments[_WEIGHTS] is not None:
            raise ConfigError(f"--weights is one of a run's: got the file {source}. Leave it out.")
        model, text = read_model(source), f"weights: {source}"
    else:
        file, text = find_weights(source, arguments[_WEIGHTS])
        is_best = file == RunDir(source).best_model
        model, text = (read_model(file), text) if is_best else _of_checkpoint(source)
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
    print(f"{text}, written to {output}")
    return 0


def _of_checkpoint(source: Path) -> tuple[dict[str, Any], str]:
    """Return the weights of a checkpoint, or of a run's newest good one, and a line that says which they are.

    As in `evaluate`, the moving average counts where there is one.
    """
    from lanewise.runs.checkpoint.folder import CheckpointFolder, read_good
    from lanewise.runs.checkpoint.saver import load_state

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
    state = load_state(folder, manifest)
    model, average = state.get("model"), state.get("average")
    if not isinstance(model, dict):
        raise CheckpointError(
            f"{folder} has no state called model, so its weights cannot be distinguished from others."
        )
    if isinstance(average, dict):
        model = {name: average.get(f"module.{name}", value) for name, value in model.items()}
    return model, f"weights: last, of step {manifest.step}"


COMMAND = Command(
    name="export",
    text="""\
Writes the weights of a run, a checkpoint or a file, or of a part of the model, by the names of the module;
with train.ema_decay their moving average, which is what training evaluates.""",
    run=export,
    operands=(_SOURCE,),
    options=(_OUTPUT, _WEIGHTS, _MODULE),
)
