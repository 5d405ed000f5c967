"""`lanewise evaluate RUN_OR_MODEL`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lanewise.cli.option import Syntax, read_arguments
from lanewise.jobs.evaluate import EvaluateJob, find_model
from lanewise.jobs.start import run_command

_HELP = """\
usage: lanewise evaluate RUN_OR_MODEL [--trust] [--key.path value ...]

Evaluates a trained model on the eval datasets of its task and prints every value: of a run directory its
model.safetensors, or the .safetensors file that is named. The values are the same on any number of devices:

  lanewise evaluate runs/mnist
  lanewise evaluate runs/mnist/best.safetensors --distributed.devices 4

  --trust            run code that lies in the run directory, too; without it only that of this environment
                     and of the project that the run was trained from
"""

_SYNTAX = Syntax("evaluate", ("RUN_OR_MODEL",), flags=("--trust",), has_overrides=True)


def evaluate(arguments: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    given = read_arguments(arguments, _SYNTAX)
    if given.wants_help or not given.names:
        print(_HELP, end="")
        return 0 if given.wants_help else 2
    trust = "--trust" in given.flags
    config, model_file, untrusted = find_model(Path(given.names[0]), given.overrides, trust=trust)
    run_command(EvaluateJob(config, model_file=model_file, untrusted=untrusted), _show)
    return 0


def _show(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        print(f"{name} {value!r}")
