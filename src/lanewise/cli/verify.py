"""`lanewise verify CONFIG`, and `lanewise verify -- PROGRAM`."""

from collections.abc import Sequence

from lanewise.cli.arguments import Argument, Arguments, Command, flag, read_count, read_counts
from lanewise.cli.result import CONFIG, JSON, show_result, showing_progress
from lanewise.config import pinned_variables
from lanewise.config.load import Override, load_config
from lanewise.errors import ConfigError
from lanewise.processes.world.environment import require_no_world


def _read_until(text: str) -> str:
    """Read how long a program is observed."""
    if text not in ("epoch", "evaluation"):
        raise ValueError("be epoch or evaluation")
    return text


_DEVICES = Argument[Sequence[int]](
    "--devices", "numbers of processes to compare with one; 1,2 if left out", "A,B", read_counts, (1, 2)
)
_STEPS = Argument(
    "--steps",
    "steps to take, the last one of the first epoch and the next one among them; 4 if left out",
    "N",
    read_count,
    default=4,
)
_UNTIL = Argument[str | None](
    "--until",
    "of a program: also look at its samples, into the second epoch (epoch) or to the end of an evaluation",
    "WHAT",
    _read_until,
    default=None,
)
_RESUME = flag("--resume", "also resumes from a checkpoint of another number of devices")


def verify(arguments: Arguments) -> int:
    """Compare numbers of devices; the exit code is 1 if something differs."""
    require_no_world("verify starts its own processes")
    if arguments.program is not None:
        return _verify_program(arguments, arguments.program)
    if arguments[_UNTIL] is not None:
        raise ConfigError("--until is of a program that follows --: got a configuration. Leave it out.")
    # The numbers of devices are those of --devices.
    config = load_config(arguments[CONFIG], [*arguments.overrides, Override("distributed.devices", "null")])

    with showing_progress() as show:
        show(f"importing {config.task.class_path}")
        from lanewise.commands.jobs.start import prepare_workers
        from lanewise.commands.verify import MODULES

        # While this process imports as well.
        prepare_workers(pinned_variables(config.distributed.threads, "exact"), *MODULES)

        from lanewise.commands.verify.verify import verify as run

        report = run(
            config,
            arguments[_DEVICES],
            num_steps=arguments[_STEPS],
            resumes=arguments[_RESUME],
            show=lambda name: show(f"running {name}"),
        )
    show_result(report, f"{arguments[CONFIG]}: {report.heading()}", arguments[JSON])
    return 0 if report.is_verified else 1


def _verify_program(arguments: Arguments, program: Sequence[str]) -> int:
    """Compare numbers of processes of a program that does not use lanewise."""
    given = [arguments[CONFIG]] if CONFIG in arguments.values else []
    given += ["--resume"] if arguments[_RESUME] else []
    given += [f"--{override.key}" for override in arguments.overrides]
    if given:
        raise ConfigError(
            f"verify takes a configuration or a program: got {given[0]} and -- too. Leave one out."
        )
    with showing_progress() as show:
        from lanewise.commands.verify.foreign.verify_program import verify_program

        report = verify_program(
            program,
            arguments[_DEVICES],
            num_updates=arguments[_STEPS],
            until=arguments[_UNTIL] or "updates",
            show=lambda name: show(f"running {name}"),
        )
    show_result(report, report.heading(), arguments[JSON])
    return 0 if report.is_verified else 1


COMMAND = Command(
    name="verify",
    text="""\
Proves on your own model and data that N devices compute what one computes, or says what differs, why, and
what to do about it. Runs a few steps on each number of devices, in `exact` whatever CONFIG says; nothing is
written to run_dir.

`-- PROGRAM` in place of CONFIG observes a program that does not use lanewise, as it is:

  lanewise verify --devices 1,2 -- python train.py --batch-size {per_process:64} --output {folder}

It runs on one process and, by torchrun, on several. The gradients of the first --steps updates are compared
with those of one process that reads the same samples. {per_process:64} is divided by the number of processes,
which {processes} is; {folder} is a folder of the run's own.""",
    run=verify,
    operands=(CONFIG,),
    options=(_DEVICES, _STEPS, _RESUME, _UNTIL, JSON),
    has_overrides=True,
    takes_program=True,
)
