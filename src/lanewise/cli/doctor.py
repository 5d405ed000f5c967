"""`lanewise doctor [CONFIG]`."""

from lanewise.cli.arguments import Argument, Arguments, Command
from lanewise.cli.plan import amount
from lanewise.cli.result import JSON, show_result, showing_progress
from lanewise.config.load import load_config
from lanewise.errors import ConfigError
from lanewise.processes.world.environment import require_no_world

_CONFIG = Argument[str | None](
    "CONFIG", "the configuration whose hosts are looked at; left out: this machine alone", default=None
)
_EXPECTED = amount(
    "--expect-gbit", "what every link must reach, in gigabits per second; else the links are compared", "GBIT"
)


def doctor(arguments: Arguments) -> int:
    """Look at hosts; the exit code is 1 if something is wrong."""
    require_no_world("doctor starts its own processes")
    file = arguments[_CONFIG]
    if file is None and arguments.overrides:
        raise ConfigError(f"--{arguments.overrides[0].key} is a key of a configuration. Name CONFIG first.")
    config = None if file is None else load_config(file, arguments.overrides)

    with showing_progress() as show:
        show(f"importing {config.task.class_path if config else 'torch'}")
        from lanewise.commands.doctor.doctor import doctor as run

        report = run(config, arguments[_EXPECTED], show)
    show_result(report, file or "this machine", arguments[JSON])
    return 0 if report.is_sound else 1


COMMAND = Command(
    name="doctor",
    text="""\
Looks at the hosts of CONFIG before a training, and names those at fault: versions, devices, ports, names,
clocks, the shared run_dir, your code; then it measures what each pair of hosts can send, in both directions.
Without hosts, or without CONFIG, it looks at this machine. Nothing is left behind.""",
    run=doctor,
    operands=(_CONFIG,),
    options=(_EXPECTED, JSON),
    has_overrides=True,
)
