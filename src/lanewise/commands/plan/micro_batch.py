"""Finds the largest micro-batch of which a step fits into the memory of one device of this machine."""

import gc
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.start import check_here, launch, launch_unseen
from lanewise.commands.plan.plan import in_eager_mode, require_losses_of_lanes
from lanewise.config import BatchConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.engine.step.lane_error import is_out_of_memory
from lanewise.errors import ConfigError, LaunchError
from lanewise.launch import LocalLauncher
from lanewise.processes.device.free_memory import free_bytes
from lanewise.processes.device.live_storage import LiveStorage
from lanewise.processes.world.world import World

_SIZES = (2, 4)
"""Sizes of the micro-batches that are tried; BatchNorm cannot train on a single sample."""
_LANES_EACH = 4
"""How many micro-batches of each size are tried, since samples may differ in size."""
_SHARE_OF_CPU, _SHARE_OF_ACCELERATOR = 0.5, 0.85
"""The share of the free memory that tensors may fill. glibc's malloc was seen to take 1.6 times the bytes of
a plain model's live tensors; an accelerator's allocator and the kernels' own memory need less."""
_GIB = 2**30


class StepMemory(NamedTuple):
    """What a step on one device takes of its memory."""

    device_type: str
    free_bytes: int | None
    """What a process may take; None where that is unknown."""
    fixed_bytes: float
    sample_bytes: float
    """What each further sample of a micro-batch takes."""

    @property
    def share(self) -> float:
        """The share of the free memory that tensors may fill."""
        return _SHARE_OF_CPU if self.device_type == "cpu" else _SHARE_OF_ACCELERATOR

    def describe(self, size: int) -> str:
        """Say what a step takes, and of what memory."""
        return (
            f"a step with micro-batches of {size:,} takes about "
            f"{(self.fixed_bytes + self.sample_bytes * size) / _GIB:.2f} GiB on one device of the type "
            f"{self.device_type}, where a process has {(self.free_bytes or 0) / _GIB:.2f} GiB free, "
            f"of which {self.share:.0%} may be used"
        )


def find_micro_batch(config: RunConfig, untrusted: Sequence[str] = ()) -> tuple[int, StepMemory]:
    """Find the largest micro-batch that divides the global batch and fits into the memory of a device here.

    What is measured is one device that has the whole model, as under ddp. On the CPU, the free memory is
    shared among as many processes as the machine has cores for.

    Args:
        config: the run; nothing is written to its run_dir. Its micro-batch and devices do not matter.
        untrusted: folders that no code may come from.

    Raises:
        ConfigError: if nothing fits, the free memory is unknown, or the loss is of all samples of a step.
        LaunchError: if a step fails.
    """
    job = MemoryJob(in_eager_mode(config), untrusted=tuple(untrusted))
    check_here(job)
    require_losses_of_lanes(config)
    memory: StepMemory = launch(job, LocalLauncher(1))
    return largest_that_fits(job.config, memory, _has_room), memory


def largest_that_fits(config: RunConfig, memory: StepMemory, has_room: Callable[[RunConfig], bool]) -> int:
    """Return the largest divisor of the global batch that fits.

    Args:
        config: the run.
        memory: what was measured of it.
        has_room: tells whether a fresh process completes the given run. Called on a CPU only, where the bytes
            of tensors do not include the overhead of malloc, nor the memory limits of a process.

    Raises:
        ConfigError: if nothing fits, or the free memory is unknown.
    """
    if memory.free_bytes is None:
        raise ConfigError(
            "--largest-micro-batch needs to know how much memory is free, which is unknown here: got device "
            f"type {memory.device_type}. Choose batch.micro_batch_size by trial."
        )
    room = memory.share * memory.free_bytes - memory.fixed_bytes
    whole = config.batch.global_batch_size
    for size in range(min(math.floor(room / memory.sample_bytes), whole), 0, -1):
        if whole % size == 0 and (
            memory.device_type != "cpu" or has_room(_trial(config, size, min(_LANES_EACH, whole // size)))
        ):
            return size
    raise ConfigError(
        f"no micro-batch fits: {memory.describe(1)}. Set memory.activation_checkpointing; or use "
        "batch.micro_batch_size=1, and shard the weights: distributed.reducer=fsdp."
    )


def _trial(config: RunConfig, size: int, num_lanes: int) -> RunConfig:
    """Return a run of one step, with micro-batches of the given size and number."""
    return replace(
        config,
        batch=BatchConfig(global_batch_size=size * num_lanes, micro_batch_size=size),
        train=replace(config.train, max_steps=1),
        # A small dataset may have too few samples for one whole step.
        data=replace(config.data, num_workers=0, drop_last=False),
    )


@final
@dataclass(frozen=True)
class MemoryJob(Job):
    """Takes steps with two sizes of small micro-batches; the result is what they take of the memory."""

    def run(self, world: World) -> StepMemory:
        free = free_bytes(world.device, max(1, (os.cpu_count() or 1) // self.config.distributed.threads))
        small, large = (self._measure(world, size) for size in _SIZES)
        each = (large - small) / (_SIZES[1] - _SIZES[0])
        if each <= 0:  # samples differ in size
            each = large / _SIZES[1]
        return StepMemory(world.device.type, free, max(0.0, large - each * _SIZES[1]), each)

    def _measure(self, world: World, size: int) -> int:
        """Return the peak bytes of tensors in a step, plus the bytes of ddp's buckets.

        On an accelerator, its allocator counts the peak.
        """
        is_counted = world.device.type != "cpu" and hasattr(torch.accelerator, "max_memory_allocated")
        if is_counted:
            torch.accelerator.reset_peak_memory_stats(world.device)
        live = LiveStorage()
        logging.disable(logging.INFO)  # the user need not read the log of this trial
        try:
            with nullcontext() if is_counted else live:
                engine = build_engine(_trial(self.config, size, _LANES_EACH), world, self.task)
                for _ in engine.steps():
                    pass
        finally:
            logging.disable(logging.NOTSET)
        buckets = sum(weight.nbytes for weight in engine.training.model.parameters() if weight.requires_grad)
        del engine
        gc.collect()  # free reference cycles before the next size is measured
        if not is_counted:
            return live.peak_bytes + buckets
        peak = int(torch.accelerator.max_memory_allocated(world.device))
        torch.accelerator.empty_cache()
        return peak + buckets


@final
@dataclass(frozen=True)
class _TrialJob(Job):
    """Takes the steps of its configuration; the result is whether there was memory for them."""

    def run(self, world: World) -> bool:
        try:
            for _ in build_engine(self.config, world, self.task).steps():
                pass
        except Exception as error:  # noqa: BLE001 - the run itself will raise it, unless it is about memory
            return not is_out_of_memory(error)
        return True


def _has_room(config: RunConfig) -> bool:
    """Tell whether a process of its own, which may be killed, has the memory for a run on one device."""
    try:
        return bool(launch_unseen(_TrialJob(config), 1))
    except LaunchError:
        return False
