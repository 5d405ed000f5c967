"""Finds the largest micro-batch that fits, for `batch.micro_batch_size: auto`."""

import gc
import logging
import math
import socket
from contextlib import nullcontext
from dataclasses import replace

import torch

from lanewise.config import BatchConfig, RunConfig
from lanewise.engine.build import build_engine
from lanewise.errors import ConfigError
from lanewise.task import Task
from lanewise.world.free_memory import free_bytes
from lanewise.world.live_storage import LiveStorage
from lanewise.world.world import World

logger = logging.getLogger(__name__)

_SIZES = (2, 4)
"""Of the micro-batches that are tried; BatchNorm cannot train on a single sample."""
_LANES_EACH = 4
"""How many of them a device tries, since samples may differ in size."""
_SHARE_OF_CPU, _SHARE_OF_ACCELERATOR = 0.5, 0.85
"""Of the free memory that tensors may fill. glibc's malloc was seen to take 1.6 times the bytes of a plain
model's live tensors; an accelerator's allocator and the kernels' own memory need less."""
_GIB = 2**30


def find_micro_batch_size(config: RunConfig, world: World, task: Task | None) -> int:
    """Measure what a step needs with two small micro-batches, and return the largest one that should fit.

    It divides the global batch, and leaves a lane for each device. What it is depends on the free memory, and
    the lanes depend on it: another machine may find another one, and so train another model.

    Collective: every rank must call this, with the same configuration. All return the same number.

    Args:
        config: with `batch.micro_batch_size: auto`.
        world: the processes.
        task: used instead of the one that the configuration names.

    Raises:
        ConfigError: if nothing fits, or nobody tells how much memory is free.
    """
    num_replicas = (config.distributed.num_devices or 1) if config.distributed.is_one_process else 1
    num_devices = world.world_size * num_replicas
    num_local = world.all_gather_object(socket.gethostname()).count(socket.gethostname())
    free = free_bytes(world.device, num_local)
    share = _SHARE_OF_CPU if world.device.type == "cpu" else _SHARE_OF_ACCELERATOR
    small, large = (_measure(config, world, task, size, num_devices) for size in _SIZES)
    each = (large - small) / (_SIZES[1] - _SIZES[0])
    if each <= 0:  # samples differ in size
        each = large / _SIZES[1]
    fixed = max(0.0, large - each * _SIZES[1])
    frees = world.all_gather_object((free, fixed, each))
    if any(one is None for one, _, _ in frees):
        raise ConfigError(
            "batch.micro_batch_size auto needs to know how much memory is free, which nobody tells here: got "
            f"device type {world.device.type}. Give a number."
        )
    least = min(math.floor((share * one - base) / more) for one, base, more in frees)
    most = config.batch.global_batch_size // num_devices
    fitting = [size for size in range(1, min(least, most) + 1) if config.batch.global_batch_size % size == 0]
    if not fitting:
        raise ConfigError(
            "batch.micro_batch_size auto finds none that fits: with a single sample in a lane a step takes "
            f"about {(fixed + each) / _GIB:.2f} GiB, and {share:.0%} of what is free is "
            f"{share * (free or 0) / _GIB:.2f} GiB. Set memory.activation_checkpointing, or share weights "
            "out: distributed.reducer=fsdp."
        )
    size = fitting[-1]
    if world.rank == 0:
        logger.info(
            "batch.micro_batch_size: auto is %d here: a step takes about %.2f GiB of %.2f GiB that are free. "
            "The model depends on it; to train the same one elsewhere, write\n"
            "batch: {global_batch_size: %d, micro_batch_size: %d}",
            size,
            (fixed + each * size) / _GIB,
            (free or 0) / _GIB,
            config.batch.global_batch_size,
            size,
        )
    return size


def _measure(config: RunConfig, world: World, task: Task | None, size: int, num_devices: int) -> int:
    """Return the most bytes of tensors that a step with such micro-batches has at once. Collective.

    On accelerators it is what their allocator counts.
    """
    trial = replace(
        config,
        batch=BatchConfig(global_batch_size=size * num_devices * _LANES_EACH, micro_batch_size=size),
        train=replace(config.train, max_steps=1),
        # A small dataset may have no whole step of so many samples; SyncBatchNorm needs whole ones.
        data=replace(config.data, num_workers=0, drop_last=config.distributed.sync_batch_norm),
        compile=None,
    )
    is_counted = world.device.type != "cpu" and hasattr(torch.accelerator, "max_memory_allocated")
    if is_counted:
        torch.accelerator.reset_peak_memory_stats(world.device)
    live = LiveStorage()
    logging.disable(logging.INFO)  # of this trial the user need not read
    try:
        with nullcontext() if is_counted else live:
            for _ in build_engine(trial, world, task).steps():
                pass
    finally:
        logging.disable(logging.NOTSET)
    gc.collect()  # what is in cycles, before the next size
    if not is_counted:
        return live.peak_bytes
    peak = int(torch.accelerator.max_memory_allocated(world.device))
    torch.accelerator.empty_cache()
    return peak
