"""A plan as it is shown: a table, and what fits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from rich.table import Table

from lanewise.commands.plan.memory import Measured, Memory, Setting
from lanewise.commands.printed import Printed
from lanewise.config import RunConfig
from lanewise.data import LaneBatch

FRAGMENTATION = 0.15
"""Part of what CUDA's caching allocator reserves that nothing can use: the mean that GMLake found, and took
away, in the fine-tuning of eight language models (https://arxiv.org/abs/2401.08156); up to 0.33 there."""


@dataclass(frozen=True)
class Row:
    """A setting, with or without activation checkpointing."""

    setting: Setting
    is_checkpointed: bool
    global_batch_size: int
    """The configured one, or the smallest that gives every device a lane."""
    memory: Memory
    fragmentation_bytes: int
    sent_bytes: float
    """What the process sends in a step."""
    limit_bytes: float | None
    """The memory of a device; None: not known."""

    @property
    def num_bytes(self) -> int:
        """What the process needs, with what fragmentation makes useless."""
        return self.memory.num_bytes + self.fragmentation_bytes

    @property
    def fits(self) -> bool:
        """Whether the memory is enough, as far as that is known."""
        return self.limit_bytes is None or self.num_bytes <= self.limit_bytes


@dataclass(frozen=True, repr=False)
class Plan(Printed):
    """What `plan` found."""

    config: RunConfig
    device_type: str
    batch: LaneBatch
    """The micro-batch with which a lane was measured."""
    measured: Sequence[Measured]
    """What was measured without activation checkpointing and, where there are blocks for it, with it."""
    rows: Sequence[Row]
    shows_parts: bool = False
    """Whether a line for each row says what its memory is made of, and whether it fits."""

    def heading(self) -> str:
        """Say what was measured."""
        turn, why_real = self.batch.turn, self.measured[0].why_real
        tensors = f"real tensors, as the task needs values ({why_real})" if why_real else "fake tensors"
        return (
            f"lane {turn.lane} of step {turn.step + 1}, the largest of the first batches, on {tensors}; "
            f"device type {self.device_type}; precision {self.config.precision}; "
            f"equality {self.config.distributed.equality}"
        )

    def table(self) -> Table:
        """Draw setting x what it needs, in 80 columns; what is nothing in every row has no column."""
        rows = [_cells(row) for row in self.rows]
        names = [name for name in rows[0] if any(row[name] for row in rows)]
        table = Table(box=None, pad_edge=False)
        for name in names:
            is_word = name in ("reducer", "recompute")
            table.add_column(name, justify="left" if is_word else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[name] for name in names))
        return table

    def lines(self) -> Iterator[str]:
        """Say what the table does not show."""
        yield from (f"note: {note}" for note in self._notes())
        if self.shows_parts:
            yield from (f"{_name(row)}: {'; '.join(_details(row))}" for row in self.rows)
        elif too_large := [_name(row) for row in self.rows if not row.fits]:
            yield f"too large: {'; '.join(too_large)}"
        if not any(row.fits for row in self.rows):
            yield "nothing fits: use a smaller batch.micro_batch_size, or more devices with fsdp"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        flops = self.flops_per_sample
        return {
            "lane": self.heading(),
            "flops_per_sample": flops,
            "rows": [_row_to_json(row) for row in self.rows],
        }

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of a sample's forward and backward."""
        return self.measured[0].num_flops / self.batch.num_samples

    def _notes(self) -> Iterator[str]:
        batch = self.config.batch
        checkpointing = self.config.memory.activation_checkpointing
        left_out = {
            "compile": self.config.compile,
            "memory.activation_checkpointing.offload": checkpointing is not None and checkpointing.offload,
            "distributed.compression": self.config.distributed.compression,
            "distributed.sync_batch_norm": self.config.distributed.sync_batch_norm,
        }
        yield from (f"{key} is set, and was left out of all numbers" for key in left_out if left_out[key])
        if self.device_type != "cpu":
            yield f"activations are those of the CPU's kernels: {self.device_type} may keep more or less"
        if flops := self.flops_per_sample:
            yield f"forward and backward of a sample: {flops:.4g} operations, for log.flops_per_sample"
        if operators := sorted({name for measured in self.measured for name in measured.not_counted}):
            yield (
                f"what {', '.join(operators)} may keep besides the results is not counted: they would "
                "have to run on real tensors, which failed or needs more memory than is free"
            )
        if why := self.measured[0].why_no_fsdp:
            yield f"no fsdp: {why}"
        larger = [row for row in self.rows if row.global_batch_size > batch.global_batch_size]
        if larger:
            yield (
                f"{larger[0].setting.num_devices:,} devices are more than the {batch.num_lanes:,} lanes of "
                f"batch.global_batch_size {batch.global_batch_size:,}: their rows are for the smallest "
                "global batch that gives each a lane"
            )


def _cells(row: Row) -> dict[str, str]:
    """Return a line of the table, by column; empty for nothing, and for what is not known."""
    return {
        "devices": f"{row.setting.num_devices:,}",
        "lanes": f"{row.setting.num_lanes_each:,}",
        "reducer": row.setting.reducer,
        "recompute": "yes" if row.is_checkpointed else "",
        "memory": _size(row.num_bytes),
        "sent": _size(row.sent_bytes) if row.sent_bytes else "",
    }


def _name(row: Row) -> str:
    checkpointed = ", recompute" if row.is_checkpointed else ""
    devices = "device" if row.setting.num_devices == 1 else "devices"
    return f"{row.setting.num_devices:,} {devices}, {row.setting.reducer}{checkpointed}"


def _details(row: Row) -> Iterator[str]:
    """Say what the memory is made of, and whether it is enough where that is known."""
    parts = {**asdict(row.memory), "allowance": row.fragmentation_bytes}
    largest_first = sorted(parts.items(), key=itemgetter(1), reverse=True)
    yield ", ".join(f"{name} {_size(size)}" for name, size in largest_first if size)
    if (limit := row.limit_bytes) is not None:
        yield f"{'fits' if row.fits else 'does not fit'}, {_size(row.num_bytes)} of {_size(limit)}"


def _size(num_bytes: float) -> str:
    if num_bytes < 2**10:
        return f"{num_bytes:.0f} B"
    exponent = min(int(math.log2(num_bytes)) // 10, 4)
    return f"{num_bytes / 2 ** (10 * exponent):.1f} {'KMGT'[exponent - 1]}iB"


def _row_to_json(row: Row) -> dict[str, Any]:
    return {
        **asdict(row.setting),
        "activation_checkpointing": row.is_checkpointed,
        "global_batch_size": row.global_batch_size,
        "memory_bytes": {**asdict(row.memory), "fragmentation": row.fragmentation_bytes},
        "total_bytes": row.num_bytes,
        "fits": row.fits,
        "sent_bytes": row.sent_bytes,
    }
