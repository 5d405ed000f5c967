"""`lanewise plan CONFIG`."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from lanewise.cli.evaluate import TRUST
from lanewise.cli.report import JSON, show_report
from lanewise.cli.syntax import Command, Flag, Given, Operand, Option, read_counts
from lanewise.config.load import load_config
from lanewise.config.marks import expand_user
from lanewise.config.override import Override
from lanewise.config.trust import distrust
from lanewise.errors import ConfigError
from lanewise.run_dir import RunDir
from lanewise.world.environment import Environment


def _read_amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise ValueError("be a number greater than 0")
    return amount


_CONFIG = Operand("CONFIG", "the configuration, as for `lanewise train`, whose --help lists its keys", str)
_DEVICES = Option[Sequence[int]](
    "--devices", "numbers of devices; 1,2,4,8 if left out", "A,B", read_counts, (1, 2, 4, 8)
)
_MEMORY = Option[float | None](
    "--memory-gib", "memory of a device, in GiB", "GIB", _read_amount, default=None
)
_LINK = Option[float | None](
    "--link-gbit",
    "what a device can send to others, in gigabits per second",
    "GBIT",
    _read_amount,
    default=None,
)
_TFLOPS = Option[float | None](
    "--tflops",
    "what a device reaches in training, in 10^12 operations per second",
    "N",
    _read_amount,
    default=None,
)
_TIME_LANE = Flag(
    "--time-lane", "instead of --tflops: takes the time of a lane and of an update on this machine's CPU"
)


def plan(given: Given) -> int:
    """Say what a run needs; the exit code is 1 if nothing fits."""
    if Environment.from_env(os.environ) is not None:
        raise ConfigError("plan runs in one process: run it without torchrun or srun.")
    if given[_TFLOPS] is not None and given[_TIME_LANE]:
        raise ConfigError("--tflops and --time-lane both give the time of a lane: leave one of them out.")
    # The numbers of devices are those of --devices.
    config = load_config(given[_CONFIG], [*given.overrides, Override("distributed.devices", "null")])
    file, trust = Path(expand_user(given[_CONFIG])), bool(given[TRUST])
    untrusted: tuple[str, ...] = ()
    if not trust and file == RunDir(file.parent).config and RunDir(file.parent).held():
        config, untrusted = distrust(file, config, given.overrides)

    from rich.console import Console

    from lanewise.plan.plan import plan as run
    from lanewise.plan.row import Machine

    memory_gib, link_gbit, tflops = given[_MEMORY], given[_LINK], given[_TFLOPS]
    machine = Machine(
        memory_bytes=None if memory_gib is None else memory_gib * 2**30,
        link_bytes_per_second=None if link_gbit is None else link_gbit * 1e9 / 8,
    )
    with Console(stderr=True).status("") as status:
        report = run(
            config,
            given[_DEVICES],
            machine,
            untrusted=untrusted,
            flops_per_second=None if tflops is None else tflops * 1e12,
            times_lane=given[_TIME_LANE],
            show=status.update,
        )
    show_report(report, f"{given[_CONFIG]}: {report.describe_lane()}", given[JSON])
    return 0 if any(row.fits for row in report.rows) else 1


COMMAND = Command(
    name="plan",
    text="""\
Says before a training what it needs under every reducer, with and without activation checkpointing: memory
of a device, what it sends in a step, and how long a step takes. One lane is measured, on tensors without
memory where the task lets it; the rest are formulas, for any number of devices. Nothing is written to
run_dir.""",
    run=plan,
    operands=(_CONFIG,),
    options=(_DEVICES, _MEMORY, _LINK, _TFLOPS, _TIME_LANE, TRUST, JSON),
    has_overrides=True,
)
