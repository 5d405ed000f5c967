"""`lanewise plan CONFIG`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lanewise.cli.arguments import Argument, Arguments, Command, flag, read_counts
from lanewise.cli.evaluate import TRUST
from lanewise.cli.result import CONFIG, JSON, show_result, showing_progress
from lanewise.config.check import expand_user
from lanewise.config.load import Override, load_config
from lanewise.config.trust import distrust, run_around
from lanewise.errors import ConfigError
from lanewise.processes.world.environment import require_no_world


def amount(name: str, meaning: str, value_name: str, unit: float = 1.0) -> Argument[float | None]:
    """Declare an option whose value is an amount, which is multiplied by its unit."""

    def read(text: str) -> float:
        try:
            amount = float(text)
        except ValueError:
            amount = math.nan
        if not 0 < amount < math.inf:
            raise ValueError("be a number greater than 0")
        return amount * unit

    return Argument(name, meaning, value_name, read, default=None)


_DEVICES = Argument[Sequence[int]](
    "--devices", "numbers of devices; 1,2,4,8 if left out", "A,B", read_counts, (1, 2, 4, 8)
)
_MEMORY = amount("--memory-gib", "memory of a device, in GiB", "GIB", 2**30)
_LARGEST = flag(
    "--largest-micro-batch",
    "instead of a table: measures on a device of this machine, and prints the largest micro-batch that fits",
)
_PARTS = flag("--parts", "says for each row what its memory is made of, and whether it fits")
_OF_TABLE = (_DEVICES, _MEMORY, _PARTS)


def plan(arguments: Arguments) -> int:
    """Say what a run needs; the exit code is 1 if nothing fits."""
    require_no_world("plan runs in one process")
    # The numbers of devices are those of --devices.
    replaced = [Override("distributed.devices", "null")]
    if arguments[_LARGEST]:
        if others := [option.name for option in (*_OF_TABLE, JSON) if option in arguments.values]:
            raise ConfigError(f"--largest-micro-batch prints no table: leave {', '.join(others)} out.")
        replaced.append(Override("batch.micro_batch_size", "1"))
    config = load_config(arguments[CONFIG], [*arguments.overrides, *replaced])
    file = Path(expand_user(arguments[CONFIG]))
    untrusted: tuple[str, ...] = ()
    if not arguments[TRUST] and (run_dir := run_around(file)) is not None:
        config, untrusted = distrust(run_dir, config, arguments.overrides)

    with showing_progress() as show:
        show(f"importing {config.task.class_path}")
        if arguments[_LARGEST]:
            from lanewise.commands.plan.micro_batch import find_micro_batch

            size, memory = find_micro_batch(config, untrusted)
            batch = replace(config.batch, micro_batch_size=size)
            lanes = "1 lane" if batch.num_lanes == 1 else f"{batch.num_lanes:,} lanes"
            print(f"{memory.describe(size)}.\nFor {lanes}, and so at most as many devices:")
            print(f"batch: {{global_batch_size: {batch.global_batch_size}, micro_batch_size: {size}}}")
            return 0
        from lanewise.commands.plan.plan import plan as run

        report = run(
            config,
            arguments[_DEVICES],
            memory_bytes=arguments[_MEMORY],
            untrusted=untrusted,
            show=show,
        )
    report = replace(report, shows_parts=arguments[_PARTS])
    show_result(report, f"{arguments[CONFIG]}: {report.heading()}", arguments[JSON])
    return 0 if any(row.fits for row in report.rows) else 1


COMMAND = Command(
    name="plan",
    text="""\
Says before a training what it needs under every reducer, with and without activation checkpointing: memory
of a device, and what it sends in a step. One lane is measured, on tensors without memory where the task lets
it; the rest are formulas, for any number of devices. With --largest-micro-batch,
steps are taken on one device instead. Nothing is written to run_dir.""",
    run=plan,
    operands=(CONFIG,),
    options=(*_OF_TABLE, _LARGEST, TRUST, JSON),
    has_overrides=True,
)
