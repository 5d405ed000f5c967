"""`lanewise verify CONFIG`."""

from collections.abc import Sequence

from lanewise.cli.arguments import Argument, Arguments, Command, flag, read_count, read_counts
from lanewise.cli.result import CONFIG, JSON, show_result, showing_progress
from lanewise.config import pinned_variables
from lanewise.config.load import Override, load_config
from lanewise.processes.world.environment import require_no_world

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
_RESUME = flag("--resume", "also goes on from a checkpoint of another number of devices")


def verify(arguments: Arguments) -> int:
    """Compare numbers of devices; the exit code is 1 if something differs."""
    require_no_world("verify starts its own processes")
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


COMMAND = Command(
    name="verify",
    text="""\
Proves on your own model and data that N devices compute what one computes, or says what differs, why, and
what to do about it. Runs a few steps on each number of devices, in `exact` whatever CONFIG says; nothing is
written to run_dir.""",
    run=verify,
    operands=(CONFIG,),
    options=(_DEVICES, _STEPS, _RESUME, JSON),
    has_overrides=True,
)
