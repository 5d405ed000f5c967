"""`lanewise bench CONFIG`."""

import signal
from collections.abc import Sequence
from typing import get_args

from lanewise.cli.arguments import Argument, Arguments, Command, read_count, read_counts
from lanewise.cli.plan import amount
from lanewise.cli.result import CONFIG, JSON, show_result, showing_progress
from lanewise.config import ReducerName, RunConfig, pinned_variables
from lanewise.config.load import Override, load_config
from lanewise.errors import ConfigError
from lanewise.processes.world.environment import require_no_world

_REDUCERS_THERE_ARE: tuple[ReducerName, ...] = get_args(ReducerName)
_INTERRUPTED = 130


def _read_reducers(text: str) -> Sequence[ReducerName]:
    names = [name for name in _REDUCERS_THERE_ARE if name in text.split(",")]
    if set(names) != set(text.split(",")):
        raise ValueError(f"list reducers of {', '.join(_REDUCERS_THERE_ARE)}")
    return names


_REDUCERS = Argument[Sequence[ReducerName]](
    "--reducers", "reducers to measure; all if left out", "A,B", _read_reducers, _REDUCERS_THERE_ARE
)
_DEVICES = Argument[Sequence[int]](
    "--devices",
    "numbers of devices of this machine; if left out one and all accelerators, on a CPU 1,2",
    "A,B",
    read_counts,
    (),
)
_SECONDS = amount("--seconds", "when to stop measuring rows that are noisy; 60 if left out", "N")
_EVALUATE = Argument[int | None](
    "--evaluate",
    "then trains every mode for N steps, and evaluates: adds time, metrics and model",
    "N",
    read_count,
    default=None,
)


def bench(arguments: Arguments) -> int:
    """Measure all modes; the exit code is 1 if none could be measured."""
    require_no_world("bench starts its own processes")

    def configure(overrides: Sequence[Override]) -> RunConfig:
        return load_config(arguments[CONFIG], [*arguments.overrides, *overrides])

    json_file = arguments[JSON]
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(
            f"{json_file} cannot be written: there is no folder {json_file.parent}. Make it, or name another."
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends it as Ctrl-C does
    with showing_progress() as show:
        config = configure([])
        show(f"importing {config.task.class_path}")
        from lanewise.commands.bench import MODULES
        from lanewise.commands.jobs.start import prepare_workers

        for equality in ("exact", "close"):  # while this process imports as well
            prepare_workers(pinned_variables(config.distributed.threads, equality), *MODULES)

        from lanewise.commands.bench.bench import bench as run
        from lanewise.processes.device.choice import count_accelerators

        num_accelerators = count_accelerators(config.distributed.device_type)
        report = run(
            configure,
            arguments[_DEVICES] or (1, num_accelerators or 2),
            arguments[_REDUCERS],
            seconds=arguments[_SECONDS] or 60.0,
            num_steps=arguments[_EVALUATE],
            show=show,
        )
    show_result(report, arguments[CONFIG], arguments[JSON])
    if report.is_interrupted:
        return _INTERRUPTED
    return int(report.best is None)


COMMAND = Command(
    name="bench",
    text="""\
Trains CONFIG under every reducer on this machine, in exact and in close, and says how fast each one is,
where its time goes, what memory it takes, and what bounds it. Nothing is written to run_dir.""",
    run=bench,
    operands=(CONFIG,),
    options=(_REDUCERS, _DEVICES, _SECONDS, _EVALUATE, JSON),
    has_overrides=True,
)
