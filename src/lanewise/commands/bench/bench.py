"""Measures the modes: as many as have room stay warm beside each other, and take turns."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from lanewise.commands.bench.bench_report import BenchReport
from lanewise.commands.bench.job import BenchJob
from lanewise.commands.bench.modes import GRADES, Configure, Mode, modes_here, overrides_of, shares_of
from lanewise.commands.bench.row import BenchRow
from lanewise.commands.bench.training import Trained, TrainingJob
from lanewise.commands.bench.warm_mode import Show, WarmMode, start, take_rounds
from lanewise.commands.jobs.start import check_here, launch_unseen
from lanewise.commands.plan.plan import plan
from lanewise.commands.plan.result import Plan
from lanewise.config import Equality, ReducerName, RunConfig
from lanewise.config.class_path import add_search_path
from lanewise.config.classes import check_classes
from lanewise.errors import ConfigError, LanewiseError, text_of

_ROOM = 2.0
"""How many times the memory of the largest mode so far must be free for another one beside it."""


def bench(
    configure: Configure,
    devices: Sequence[int],
    reducers: Sequence[ReducerName],
    *,
    seconds: float,
    num_steps: int | None = None,
    show: Show = lambda _: None,
) -> BenchReport:
    """Measure the user's task under each reducer, on numbers of devices, in both grades.

    Args:
        configure: gives the run; nothing is written to its run_dir.
        devices: numbers of devices of this machine.
        reducers: those to measure, where they can have so many devices.
        seconds: when rounds end, although some rows may be noisy still.
        num_steps: how many steps each mode of the configuration's grade is trained for afterwards, from the
            first one, to be evaluated; None: none.
        show: see `Show`.

    Returns:
        What was measured, until the user interrupted it.

    Raises:
        ConfigError: if a class in the configuration is not what its section needs, or a launcher is set.
        DataError: if the dataset is empty.
        TaskError: if a lane cannot be trained.
    """
    begin = time.monotonic()
    config = configure([])
    add_search_path(config.search_path)
    check_classes(config)
    if config.distributed.launcher != "local":
        raise ConfigError(
            f"bench measures this machine: got distributed.launcher {config.distributed.launcher}. Run it on "
            "one of the hosts with --distributed.launcher local."
        )
    modes = modes_here(reducers, devices, config)
    plans, why_no_plan = _plans(config, sorted({mode.num_devices for mode in modes}), show)
    rows = {mode: _row(mode, config, plans.get(mode.equality)) for mode in modes}
    report = BenchReport(config, rows, why_no_plan)
    try:
        _measure(rows, configure, begin + seconds, show)
        if num_steps is not None:
            for row in report.measured:
                show(f"training {num_steps:,} steps: {row.mode}")
                try:
                    row.trained = _train(row.mode, configure, num_steps)
                except LanewiseError as error:
                    row.training_failure = text_of(error)
    except KeyboardInterrupt:
        report.is_interrupted = True
    return report


def _plans(config: RunConfig, devices: Sequence[int], show: Show) -> tuple[Mapping[Equality, Plan], str]:
    """Return the plan of each grade; none, and why, where plan cannot tell."""
    plans: dict[Equality, Plan] = {}
    try:
        for equality in GRADES:
            of_grade = replace(config, distributed=replace(config.distributed, equality=equality))
            plans[equality] = plan(of_grade, devices, show=show)
    except LanewiseError as error:
        return {}, text_of(error)
    return plans, ""


def _row(mode: Mode, config: RunConfig, plan: Plan | None) -> BenchRow:
    """Return the row of a mode that has not been measured, with what the plan says of it."""
    row = BenchRow(mode, precision=config.precision)
    if plan is None:
        return row
    row.flops_per_sample = plan.flops_per_sample
    is_checkpointed = config.memory.activation_checkpointing is not None
    for planned in plan.rows:
        setting = planned.setting
        is_of_mode = (setting.reducer, setting.num_devices) == (mode.reducer, mode.num_devices)
        if is_of_mode and planned.is_checkpointed == is_checkpointed:
            row.planned_bytes, row.sent_bytes = planned.memory.num_bytes, planned.sent_bytes
    return row


def _measure(rows: Mapping[Mode, BenchRow], configure: Configure, end: float, show: Show) -> None:
    """Measure group after group; the modes of a group stay warm beside each other."""
    waiting, begin = list(rows.values()), time.monotonic()
    while waiting:
        with ExitStack() as stack:
            modes: dict[BenchRow, WarmMode] = {}
            while waiting and _have_room(modes.values()):
                row = waiting.pop(0)
                show(f"starting {row.mode}")
                mode = start(row, partial(jobs_of, row.mode, configure))
                if mode is not None:
                    modes[row] = mode
                    stack.callback(mode.close)
            take_rounds(modes, end - (end - begin) * len(waiting) / len(rows), show)
            for mode in modes.values():  # so that all end at the same time
                mode.dismiss()


def _train(mode: Mode, configure: Configure, num_steps: int) -> Trained:
    """Train a mode for so many steps, and evaluate the model."""
    job = TrainingJob(jobs_of(mode, configure)[0].config, num_steps=num_steps)
    check_here(job)
    return Trained(**launch_unseen(job, job.config.distributed.num_processes or 1))


def jobs_of(mode: Mode, configure: Configure) -> list[BenchJob]:
    """Return the job of each world of a mode on this machine.

    Args:
        mode: how lanes are spread.
        configure: see `Configure`.

    Raises:
        ConfigError: if the configuration cannot have this mode.
    """
    distributed = configure([]).distributed
    if not mode.is_ceiling:
        return [BenchJob(configure(list(overrides_of(mode, distributed))))]
    alone = configure(list(overrides_of(mode._replace(num_devices=1), distributed)))
    return [BenchJob(share) for share in shares_of(alone, mode.num_devices)]


def _have_room(modes: Iterable[WarmMode]) -> bool:
    """Tell whether another mode fits beside these, by the memory that they took."""
    taken, left = [0], []
    for mode in modes:
        known = [first.free_bytes for first in mode.firsts if None not in first.free_bytes]
        if known:
            before, after = zip(*known, strict=True)
            taken.append(max(before) - min(after))
            left.append(min(after))
    return not left or min(left) > _ROOM * max(taken)
