"""`lanewise evaluate RUN_OR_MODEL`."""

from collections.abc import Mapping

from lanewise.cli.arguments import Argument, Arguments, Command, flag, read_path

_RUN_OR_MODEL = Argument(
    "RUN_OR_MODEL",
    "a run_dir, for its model.safetensors (with train.ema_decay for its averaged.safetensors); or a "
    ".safetensors file in one",
    read=read_path,
)
TRUST = flag(
    "--trust",
    "runs code that lies in the run directory, too, and builds any class that the run names; without it only "
    "code of this environment and of the project that the run was trained from",
)

DRY_RUN = flag("--dry-run", "prints what would be started or submitted, and does nothing")


def evaluate(arguments: Arguments) -> int:
    """Evaluate a trained model and print every value."""
    from lanewise.jobs.evaluate import evaluate_job
    from lanewise.jobs.start import run_command

    job = evaluate_job(arguments[_RUN_OR_MODEL], arguments.overrides, trust=arguments[TRUST])
    run_command(job, _show, is_dry=arguments[DRY_RUN])
    return 0


def _show(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        print(f"{name} {value!r}")


COMMAND = Command(
    name="evaluate",
    text="""\
Evaluates a trained model on the eval datasets of its task and prints every value. The values are the same on
any number of devices:

  lanewise evaluate runs/mnist
  lanewise evaluate runs/mnist/best.safetensors --distributed.devices 4""",
    run=evaluate,
    operands=(_RUN_OR_MODEL,),
    options=(TRUST, DRY_RUN),
    has_overrides=True,
)
