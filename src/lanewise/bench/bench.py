"""Measures the modes: as many as have room stay warm beside each other, and take turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from lanewise.bench.job import LEAST_ROUNDS, BenchJob, Turn
from lanewise.bench.modes import GRADES, Mode, modes_of, overrides_of, shares_of
from lanewise.bench.report import Report
from lanewise.bench.rounds import take_turns
from lanewise.bench.row import Row
from lanewise.bench.side import Side
from lanewise.config import Equality, ReducerName, RunConfig
from lanewise.config.load import Override
from lanewise.device.peak import peak_flops_per_second
from lanewise.errors import LanewiseError, text_of
from lanewise.launch.scratch import scratch_folder
from lanewise.plan.plan import plan
from lanewise.plan.result import Plan
from lanewise.plan.row import Machine

Configure: TypeAlias = Callable[[Sequence[Override]], RunConfig]
"""Reads the configuration again with further overrides."""
_ROOM = 2.0
"""How many times the memory of the largest side so far must be free for another one beside it."""


def bench(
    configure: Configure,
    devices: Sequence[int],
    reducers: Sequence[ReducerName],
    *,
    seconds: float,
    show: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure the user's task under each reducer, on numbers of devices of this machine, in both grades.

    Args:
        configure: gives the run; nothing is written to its run_dir.
        devices: numbers of devices.
        reducers: those to measure, where they can have so many devices.
        seconds: when rounds end, although some rows may be noisy still.
        show: called with what is being done.

    Returns:
        What was measured, until the user interrupted it.

    Raises:
        ConfigError: if a class in the configuration is not what its section needs.
        DataError: if the dataset is empty.
        TaskError: if a lane cannot be trained.
    """
    begin = time.monotonic()
    config = configure([Override("distributed.devices", "null")])
    config.batch.require_number("bench")
    modes = list(modes_of(reducers, devices))
    ceilings = [Mode("single", count, config.distributed.equality) for count in devices if count > 1]
    plans, why_no_plan = _plans(config, devices, show)
    rows = {mode: _row(mode, config, plans.get(mode.equality)) for mode in (*modes, *ceilings)}
    report = Report(config, rows, why_no_plan)
    try:
        with scratch_folder() as folder:
            _Measurement(configure, rows, folder, begin, seconds, show).run()
    except KeyboardInterrupt:
        report.is_interrupted = True
    return report


def _plans(
    config: RunConfig, devices: Sequence[int], show: Callable[[str], None]
) -> tuple[Mapping[Equality, Plan], str]:
    """Return the plan of each grade; none, and why, where plan cannot tell."""
    plans: dict[Equality, Plan] = {}
    try:
        for equality in GRADES:
            of_grade = replace(config, distributed=replace(config.distributed, equality=equality))
            plans[equality] = plan(of_grade, devices, Machine(), show=show)
    except LanewiseError as error:
        return {}, text_of(error)
    return plans, ""


def _row(mode: Mode, config: RunConfig, plan: Plan | None) -> Row:
    """Return the row of a mode that has not been measured, with what the plan says of it."""
    if plan is None:
        return Row(mode)
    is_checkpointed = config.memory.activation_checkpointing is not None
    for planned in plan.rows:
        setting = planned.setting
        if (setting.reducer, setting.num_devices) == (
            mode.reducer,
            mode.num_devices,
        ) and planned.is_checkpointed == is_checkpointed:
            return Row(mode, planned.memory.num_bytes, planned.sent_bytes, plan.flops_per_sample)
    return Row(mode, flops_per_sample=plan.flops_per_sample)


class _Measurement:
    """Fills the rows.

    Args:
        configure: gives the run of a mode.
        rows: by mode.
        folder: where sockets may lie.
        begin: when the time began.
        seconds: how much of it there is.
        show: called with what is being done.
    """

    def __init__(
        self,
        configure: Configure,
        rows: Mapping[Mode, Row],
        folder: Path,
        begin: float,
        seconds: float,
        show: Callable[[str], None],
    ) -> None:
        self._configure = configure
        self._rows = rows
        self._folder = folder
        self._begin = begin
        self._seconds = seconds
        self._show = show

    def run(self) -> None:
        """Measure group after group; a group stays warm, and takes turns."""
        waiting = list(self._rows)
        while waiting:
            with ExitStack() as stack:
                sides: dict[Mode, Side] = {}
                while waiting and _have_room(sides):
                    mode = waiting.pop(0)
                    if (side := self._start(mode)) is not None:
                        sides[mode] = side
                        stack.callback(side.close)
                done = 1 - len(waiting) / len(self._rows)
                self._take_rounds(sides, self._begin + self._seconds * done)
                for side in sides.values():  # so that all end at the same time
                    side.dismiss()

    def _start(self, mode: Mode) -> Side | None:
        """Start a side; None where it fails, which its row notes."""
        self._show(f"starting {mode}")
        row = self._rows[mode]
        try:
            side = Side(self._jobs(mode), self._folder, str(list(self._rows).index(mode)))
        except LanewiseError as error:
            row.failure = text_of(error)
            return None
        row.firsts = side.firsts
        row.peak_flops = peak_flops_per_second(side.firsts[0].device, self._configure([]).precision)
        return side

    def _jobs(self, mode: Mode) -> list[BenchJob]:
        """Return what the worlds of a mode run."""
        distributed = self._configure([Override("distributed.devices", "null")]).distributed
        if not mode.is_ceiling:
            return [BenchJob(self._configure(list(overrides_of(mode, distributed))))]
        alone = self._configure(list(overrides_of(mode._replace(num_devices=1), distributed)))
        return [BenchJob(share) for share in shares_of(alone, mode.num_devices)]

    def _take_rounds(self, sides: Mapping[Mode, Side], end: float) -> None:
        """Let the sides take turns until all are steady, or until the time is over."""
        turns = {mode: partial(self._take_turn, mode, side) for mode, side in sides.items()}
        for number, _ in enumerate(take_turns(turns), start=1):
            rows = [self._rows[mode] for mode in sides if not self._rows[mode].failure]
            noisy = [row for row in rows if not row.is_steady]
            self._show(f"round {number}: {len(noisy)} of {len(rows)} rows are noisy")
            if not noisy or (number >= LEAST_ROUNDS and time.monotonic() > end):
                return

    def _take_turn(self, mode: Mode, side: Side) -> None:
        """Let a side take a turn, unless it has failed."""
        row = self._rows[mode]
        if row.failure:
            return
        try:
            turns: Sequence[Turn] = side.take_turn()
        except LanewiseError as error:
            row.failure = text_of(error)
        else:
            row.rounds.append(turns)


def _have_room(sides: Mapping[Mode, Side]) -> bool:
    """Tell whether another side fits beside these, by the memory that they took."""
    taken, left = [0], []
    for side in sides.values():
        known = [first.free_bytes for first in side.firsts if None not in first.free_bytes]
        if known:
            before, after = zip(*known, strict=True)
            taken.append(max(before) - min(after))
            left.append(min(after))
    return not left or min(left) > _ROOM * max(taken)
