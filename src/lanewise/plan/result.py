"""A plan as it is shown: a table, a line for each row, and the fastest one that fits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from rich.table import Table

from lanewise.config import RunConfig
from lanewise.data import LaneBatch
from lanewise.plan.memory import Measured
from lanewise.plan.row import Row


@dataclass(frozen=True)
class Plan:
    """What `plan` found."""

    config: RunConfig
    device_type: str
    batch: LaneBatch
    """The micro-batch with which a lane was measured."""
    measured: Sequence[Measured]
    """Without activation checkpointing, and where there are blocks for it, with it."""
    rows: Sequence[Row]

    @property
    def fastest(self) -> Row | None:
        """The row with most samples per second, of those that fit; None where times are not known."""
        timed = [row for row in self.rows if row.fits and row.samples_per_second is not None]
        return max(timed, key=lambda row: row.samples_per_second or 0.0, default=None)

    def describe_lane(self) -> str:
        """Say what was measured."""
        turn, why_real = self.batch.turn, self.measured[0].why_real
        tensors = f"real tensors, as the task needs values ({why_real})" if why_real else "fake tensors"
        return (
            f"lane {turn.lane} of step {turn.step + 1}, the largest of the first batches, on {tensors}; "
            f"device type {self.device_type}; precision {self.config.precision}; "
            f"equality {self.config.distributed.equality}"
        )

    def table(self) -> Table:
        """Draw setting x what it needs; what is nothing in every row has no column."""
        rows = [_cells(row) for row in self.rows]
        names = [name for name in rows[0] if any(row[name] for row in rows)]
        table = Table(box=None, pad_edge=False)
        for name in names:
            is_word = name in ("reducer", "checkpointing")
            table.add_column(name, justify="left" if is_word else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[name] for name in names))
        return table

    def lines(self) -> Iterator[str]:
        """Say what the table does not show; the last line is the choice."""
        yield from (f"note: {note}" for note in self._notes())
        yield from (f"{_name(row)}: {verdict}" for row in self.rows if (verdict := _verdict(row)))
        if fastest := self.fastest:
            yield f"fastest that fits: {_name(fastest)}, {fastest.samples_per_second:,.4g} samples/s"
        elif not any(row.fits for row in self.rows):
            yield "nothing fits: use a smaller batch.micro_batch_size, or more devices with fsdp"
        else:
            yield "which is fastest is not known: give --tflops or --time-lane, and --link-gbit"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        flops = self._flops_per_sample
        return {
            "lane": self.describe_lane(),
            "flops_per_sample": flops,
            "rows": [_row_to_json(row) for row in self.rows],
        }

    @property
    def _flops_per_sample(self) -> float:
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
        if flops := self._flops_per_sample:
            yield f"forward and backward of a sample: {flops:.4g} operations, for log.flops_per_sample"
        if operators := sorted({name for one in self.measured for name in one.not_counted}):
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
    needed = {"allowance": row.fragmentation_bytes, "all": row.num_bytes, "sent": row.sent_bytes}
    seconds = {"link, s": row.link_seconds, "step, s": row.step and row.step.total}
    return {
        "devices": f"{row.setting.num_devices:,}",
        "lanes": f"{row.setting.num_lanes_each:,}",
        "reducer": row.setting.reducer,
        "checkpointing": "yes" if row.is_checkpointed else "",
        **{name: _size(size) if size else "" for name, size in (asdict(row.memory) | needed).items()},
        **{name: f"{time:.3g}" if time else "" for name, time in seconds.items()},
    }


def _name(row: Row) -> str:
    checkpointed = ", checkpointing" if row.is_checkpointed else ""
    devices = "device" if row.setting.num_devices == 1 else "devices"
    return f"{row.setting.num_devices:,} {devices}, {row.setting.reducer}{checkpointed}"


def _verdict(row: Row) -> str:
    """Say in a few words whether a setting fits and what limits it, as far as that is known."""
    said, limit, step = [], row.machine.memory_bytes, row.step
    if limit is not None:
        said = [f"{'fits' if row.fits else 'does not fit'}, {_size(row.num_bytes)} of {_size(limit)}"]
    if not row.fits:
        name, size = max(asdict(row.memory).items(), key=itemgetter(1))
        said.append(f"most of it: {name}, {_size(size)}")
    elif step is not None and step.exposed > step.compute:
        said.append(f"the link is the limit: {step.exposed:.3g} of {step.total:.3g} s of a step wait for it")
    elif step is not None:
        said.append(f"computing is the limit: {step.compute:.3g} of {step.total:.3g} s of a step")
    return "; ".join(said)


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
        "link_seconds": row.link_seconds,
        "step_seconds": None if row.step is None else row.step.total,
        "samples_per_second": row.samples_per_second,
    }
