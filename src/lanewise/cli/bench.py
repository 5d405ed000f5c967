"""`lanewise bench CONFIG`."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lanewise.cli.arguments import Argument, Arguments, Command, read_count, read_counts, read_path
from lanewise.cli.plan import amount
from lanewise.cli.result import CONFIG, JSON, show_result, showing_progress
from lanewise.config import ReducerName, RunConfig, pinned_variables
from lanewise.config.load import Override, load_config
from lanewise.errors import ConfigError
from lanewise.processes.world.environment import require_no_world
from lanewise.runs.file import read_json, reason

_REDUCERS_THERE_ARE: tuple[ReducerName, ...] = get_args(ReducerName)
_INTERRUPTED = 130
_MOST_BYTES = 16 * 2**20
"""A file that --json wrote is smaller."""


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
_COMPARE = Argument[Path | None](
    "--compare", "what an earlier --json wrote here: says which rows changed", "OLD", read_path, default=None
)


def bench(arguments: Arguments) -> int:
    """Measure all modes; the exit code is 1 if none could be measured, or one is slower than before."""
    require_no_world("bench starts its own processes")

    def configure(overrides: Sequence[Override]) -> RunConfig:
        return load_config(arguments[CONFIG], [*arguments.overrides, *overrides])

    json_file = arguments[JSON]
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(
            f"{json_file} cannot be written: there is no folder {json_file.parent}. Make it, or name another."
        )
    before = _read(file) if (file := arguments[_COMPARE]) is not None else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends it as Ctrl-C does
    with showing_progress() as show:
        config = configure([])
        show(f"importing {config.task.class_path}")
        from lanewise.commands.bench import MODULES
        from lanewise.commands.jobs.start import prepare_workers

        for equality in ("exact", "close"):  # while this process imports as well
            prepare_workers(pinned_variables(config.distributed.threads, equality), *MODULES)

        from lanewise.commands.bench.bench import bench as run
        from lanewise.commands.bench.compare import compare, require_comparable
        from lanewise.processes.device.choice import count_accelerators

        if before is not None:
            require_comparable(before, config)
        num_accelerators = count_accelerators(config.distributed.device_type)
        report = run(
            configure,
            arguments[_DEVICES] or (1, num_accelerators or 2),
            arguments[_REDUCERS],
            seconds=arguments[_SECONDS] or 60.0,
            num_steps=arguments[_EVALUATE],
            show=show,
        )
    if before is not None:
        report = replace(report, changes=list(compare(before, report.to_json())))
    show_result(report, arguments[CONFIG], arguments[JSON])
    if report.is_interrupted:
        return _INTERRUPTED
    return int(report.best is None or any(change.is_slower for change in report.changes or ()))


def _read(file: Path) -> Any:
    try:
        return read_json(file.resolve(), _MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {reason(error, file)}. Give --compare what an earlier --json wrote."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--compare needs what an earlier `lanewise bench --json` wrote: got {file}, which is no JSON "
            f"({error}). Write it again."
        ) from None


COMMAND = Command(
    name="bench",
    text="""\
Trains CONFIG under every reducer on this machine, in exact and in close, and says how fast each one is,
where its time goes, what memory it takes, and what bounds it. Nothing is written to run_dir.""",
    run=bench,
    operands=(CONFIG,),
    options=(_REDUCERS, _DEVICES, _SECONDS, _EVALUATE, _COMPARE, JSON),
    has_overrides=True,
)
