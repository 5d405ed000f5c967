"""Tries what makes a run faster and leaves its model the same."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from lanewise.commands.bench.job import BenchJob
from lanewise.commands.bench.row import BenchRow
from lanewise.commands.bench.warm_mode import Show, start, take_rounds
from lanewise.config import RunConfig
from lanewise.config.load import Override
from lanewise.config.strict_yaml import read_yaml, write_yaml

ANOTHER_MODEL = "batch.global_batch_size, batch.micro_batch_size, precision, distributed.threads"
"""What may be faster, but trains another model."""
_NUM_TRIALS = 6
"""The time is shared out among so many trials."""


@dataclass(frozen=True)
class Trial:
    """A change of the configuration, and what came of it."""

    change: Override
    is_kept: bool
    gain: float | None = None
    """How many times as fast the run was with it; None where it failed."""
    failure: str = ""

    def __str__(self) -> str:
        name = f"--{self.change.key}={self.change.text}"
        if self.gain is None:
            return f"{name}: {self.failure}"
        return f"{name}: {self.gain:.2f} times as fast, {'kept' if self.is_kept else 'not kept'}"


def tune(
    fastest: BenchRow,
    config: RunConfig,
    build_jobs: Callable[[Sequence[Override]], Sequence[BenchJob]],
    block_classes: Sequence[str],
    *,
    seconds: float,
    show: Show,
) -> Iterator[Trial]:
    """Try one change after the other in the fastest mode, and keep those that help beyond the spread.

    Args:
        fastest: the row of the mode.
        config: the run, in that mode.
        build_jobs: returns the jobs of the mode with some overrides.
        block_classes: classes of the model's modules that may be blocks.
        seconds: for all trials.
        show: see `Show`.
    """
    kept: list[Override] = []
    for change in _changes(config, block_classes):
        show(f"trying --{change.key}={change.text}")
        end = time.monotonic() + seconds / _NUM_TRIALS
        trial = _try(fastest, build_jobs, kept, change, end)
        yield trial
        if trial.is_kept:
            kept = [*(override for override in kept if override.key != change.key), change]


def _changes(config: RunConfig, block_classes: Sequence[str]) -> Iterator[Override]:
    """Yield what to try."""
    most = 2 * (os.cpu_count() or 1)
    for number in (2**power for power in range(4)):
        if config.data.num_workers < number <= most:
            yield Override("data.num_workers", str(number))
    checkpointing = config.memory.activation_checkpointing
    if checkpointing is not None or block_classes:
        yield Override("memory.activation_checkpointing", "auto" if checkpointing is None else "null")
    if config.distributed.kind.shards_weights:
        for name in block_classes:
            if config.distributed.fsdp.blocks != (name,):
                yield Override("distributed.fsdp.blocks", f"[{name}]")
    if config.distributed.equality == "close" and config.compile is None:
        yield Override("compile", "auto" if block_classes else "whole")


def _try(
    fastest: BenchRow,
    build_jobs: Callable[[Sequence[Override]], Sequence[BenchJob]],
    kept: Sequence[Override],
    change: Override,
    end: float,
) -> Trial:
    """Let the run with the change and the run without it take turns."""
    before, after = BenchRow(fastest.mode), BenchRow(fastest.mode)
    overrides = {before: kept, after: [*kept, change]}
    with ExitStack() as stack:
        modes = {}
        for row, given in overrides.items():
            mode = start(row, partial(build_jobs, given))
            if mode is None:
                return Trial(change, is_kept=False, failure=row.failure)
            stack.callback(mode.close)
            modes[row] = mode
        take_rounds(modes, end, lambda _: None)
    slow, fast = before.samples_per_second, after.samples_per_second
    if slow is None or fast is None or before.failure or after.failure:
        return Trial(change, is_kept=False, failure=after.failure or before.failure)
    if change.key != "compile" and before.model != after.model:
        return Trial(change, is_kept=False, failure="the model is another one: `lanewise verify` says why")
    return Trial(change, is_kept=after.is_faster_than(before), gain=fast.median / slow.median)


def to_paste(overrides: Sequence[Override]) -> str:
    """Write overrides as the part of a configuration file that they stand for."""
    tree: dict[str, Any] = {}
    for key, text in overrides:
        *sections, name = key.split(".")
        section = tree
        for outer in sections:
            section = section.setdefault(outer, {})
        section[name] = read_yaml(text or "", source=key)
    return write_yaml(tree).rstrip()
