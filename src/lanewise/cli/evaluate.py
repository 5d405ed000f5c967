"""`lanewise evaluate RUN_OR_MODEL`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lanewise.cli.arguments import Argument, Arguments, Command, flag, read_path
from lanewise.cli.result import JSON, STDOUT, write_json

RUN_OR_MODEL = Argument(
    "RUN_OR_MODEL",
    "a run_dir; a .safetensors file in one; or a configuration, with --weights FILE",
    read=read_path,
)
WEIGHTS = Argument[Path | None](
    "--weights",
    "of the run, or a file that lies anywhere; if left out: best where evaluate.best keeps them, else last",
    *("best|last|FILE", read_path),
    default=None,
)
TRUST = flag(
    "--trust",
    "runs code of the run, and of any folder that it names, and builds any class; without it only code of "
    "this environment, of the working directory and of --search_path",
)

DRY_RUN = flag("--dry-run", "prints what would be started or submitted, and does nothing")


def evaluate(arguments: Arguments) -> int:
    """Evaluate a trained model and print every value."""
    from lanewise.commands.jobs.evaluate import evaluate_job
    from lanewise.commands.jobs.start import run_command

    job = evaluate_job(
        arguments[RUN_OR_MODEL], arguments.overrides, trust=arguments[TRUST], weights=arguments[WEIGHTS]
    )
    run_command(job, partial(_show, job.model_file, arguments[JSON]), is_dry=arguments[DRY_RUN])
    return 0


def _show(model_file: Path, json_file: Path | None, result: Mapping[str, Any]) -> None:
    """Show the values of a model, and write them to a file if there is one."""
    if json_file is not None:
        write_json(json_file, {"model": str(model_file), **result})
        if json_file == STDOUT:
            return
    counts = ", ".join(f"{number:,} of {name}" for name, number in result["num_samples"].items())
    print(f"{model_file} on samples: {counts}")
    width = max(map(len, result["values"]))
    for name, value in result["values"].items():
        print(f"{name:<{width}}  {value:.6g}")


COMMAND = Command(
    name="evaluate",
    text="""\
Evaluates a trained model on the eval datasets of its task and prints every value, rounded; --json has all
digits. The values are the same on any number of devices:

  lanewise evaluate runs/mnist
  lanewise evaluate runs/mnist/best.safetensors --distributed.devices 4
  lanewise evaluate mnist.yaml --weights model.safetensors""",
    run=evaluate,
    operands=(RUN_OR_MODEL,),
    options=(WEIGHTS, JSON, TRUST, DRY_RUN),
    has_overrides=True,
)
