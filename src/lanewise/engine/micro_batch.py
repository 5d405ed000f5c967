"""Finds the largest micro-batch that fits, for `batch.micro_batch_size: auto`."""

import gc
import logging
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from lanewise.config import BatchConfig, RunConfig
from lanewise.device.free_memory import free_bytes
from lanewise.device.live_storage import LiveStorage
from lanewise.engine.engine import build_engine
from lanewise.engine.run.model import build_task
from lanewise.errors import ConfigError
from lanewise.task import Task
from lanewise.world.world import LocalWorld, World

logger = logging.getLogger(__name__)

_SIZES = (2, 4)
"""Sizes of the micro-batches that are tried; BatchNorm cannot train on a single sample."""
_LANES_EACH = 4
"""How many micro-batches of each size are tried, since samples may differ in size."""
_SHARE_OF_CPU, _SHARE_OF_ACCELERATOR = 0.5, 0.85
"""The share of the free memory that tensors may fill. glibc's malloc was seen to take 1.6 times the bytes of
a plain model's live tensors; an accelerator's allocator and the kernels' own memory need less."""
_GIB = 2**30


def find_micro_batch_size(
    config: RunConfig, world: World, task: Task | None, fits: Callable[[RunConfig], bool]
) -> int:
    """Measure the memory of a step with two small micro-batches, and return the largest size that should fit.

    The size divides the global batch. It depends on the free memory, and the lanes depend on it: another
    machine may find another size, and so train another model. It does not depend on the number of devices:
    the measurement is of one device that carries the model alone, and the free memory is shared among as many
    processes as the machine has cores for.

    Collective: every rank must call this, with the same configuration. All return the same number.

    Args:
        config: with `batch.micro_batch_size: auto`.
        world: the processes.
        task: used instead of the one that the configuration names.
        fits: tells whether a fresh process completes the given run. Called on rank 0 and on a CPU only, where
            the bytes of tensors do not include the overhead of malloc, nor the memory limits of a process.

    Raises:
        ConfigError: if nothing fits, the free memory is unknown, a device has no lane, or the loss is of all
            samples of a step.
    """
    if (task or build_task(config)).loss_method() != "loss":
        raise ConfigError(
            "batch.micro_batch_size auto measures micro-batches, not a loss of all samples of a step: got a "
            "task with batch_loss or row_loss. Give a number; memory/peak_gib of a run with "
            "--train.max_steps 2 shows what a step takes."
        )
    batch, is_cpu = config.batch, world.device.type == "cpu"
    num_processes = max(1, (os.cpu_count() or 1) // config.distributed.threads)
    free = free_bytes(world.device, num_processes)
    share = _SHARE_OF_CPU if is_cpu else _SHARE_OF_ACCELERATOR
    small, large = (_measure(_trial(config, size, _LANES_EACH), world, task) for size in _SIZES)
    each = (large - small) / (_SIZES[1] - _SIZES[0])
    if each <= 0:  # samples differ in size
        each = large / _SIZES[1]
    fixed = max(0.0, large - each * _SIZES[1])
    frees = world.all_gather_tree((free, fixed, each))
    if any(one is None for one, _, _ in frees):
        raise ConfigError(
            "batch.micro_batch_size auto needs to know how much memory is free, which is unknown here: got "
            f"device type {world.device.type}. Give a number."
        )
    most = min(math.floor((share * one - base) / more) for one, base, more in frees)
    size, whole = 0, batch.global_batch_size
    if world.rank == 0:
        for one in (one for one in range(min(most, whole), 0, -1) if whole % one == 0):
            if not is_cpu or fits(_trial(config, one, min(_LANES_EACH, whole // one))):
                size = one
                break
    found: int = world.broadcast_tree(size)
    if not found:
        raise ConfigError(
            "batch.micro_batch_size auto finds no size that fits: with a single sample in each lane, a step "
            f"on one device takes about {(fixed + each) / _GIB:.2f} GiB, and {share:.0%} of the free memory "
            f"is {share * (free or 0) / _GIB:.2f} GiB. Set memory.activation_checkpointing; or give a "
            "number, and shard the weights: distributed.reducer=fsdp."
        )
    if world.rank == 0:
        logger.info(
            "batch.micro_batch_size: auto is %d here: a step takes about %.2f GiB of %.2f GiB that are free. "
            "The model depends on it; to train the same one elsewhere, write\n"
            "batch: {global_batch_size: %d, micro_batch_size: %d}",
            found,
            (fixed + each * found) / _GIB,
            (free or 0) / _GIB,
            batch.global_batch_size,
            found,
        )
    _require_a_lane_each(config, world, found)
    return found


def _require_a_lane_each(config: RunConfig, world: World, size: int) -> None:
    """Raise ConfigError where a micro-batch that fits leaves fewer lanes than there are devices."""
    num_replicas = (config.distributed.num_devices or 1) if config.distributed.is_one_process else 1
    num_devices, whole = world.world_size * num_replicas, config.batch.global_batch_size
    num_lanes = whole // size
    if num_lanes < num_devices:
        smaller = next(one for one in range(whole // num_devices, 0, -1) if whole % one == 0)
        raise ConfigError(
            f"batch.micro_batch_size auto is {size} here on any number of devices, as the model depends on "
            f"it: got {num_lanes} lane{'s' * (num_lanes != 1)} of batch.global_batch_size {whole} for "
            f"{num_devices} devices, each of which needs one. Write batch.micro_batch_size={smaller}, or use "
            f"distributed.devices={num_lanes}, or a global_batch_size of at least {size * num_devices}."
        )


def _trial(config: RunConfig, size: int, num_lanes: int) -> RunConfig:
    """Return a run of one step on one device, with micro-batches of the given size and number."""
    distributed = replace(config.distributed, reducer="ddp", devices=None, sync_batch_norm=False)
    return replace(
        config,
        batch=BatchConfig(global_batch_size=size * num_lanes, micro_batch_size=size),
        train=replace(config.train, max_steps=1),
        # A small dataset may have too few samples for one whole step.
        data=replace(config.data, num_workers=0, drop_last=False),
        distributed=distributed,
        compile=None,
    )


def _measure(trial: RunConfig, world: World, task: Task | None) -> int:
    """Return the peak bytes of tensors in a step on one device, plus the bytes of ddp's buckets.

    On an accelerator, its allocator counts the peak.
    """
    is_counted = world.device.type != "cpu" and hasattr(torch.accelerator, "max_memory_allocated")
    if is_counted:
        torch.accelerator.reset_peak_memory_stats(world.device)
    live = LiveStorage()
    logging.disable(logging.INFO)  # the user need not read the log of this trial
    try:
        with nullcontext() if is_counted else live:
            engine = build_engine(trial, LocalWorld(world.device), task)
            for _ in engine.steps():
                pass
    finally:
        logging.disable(logging.NOTSET)
    buckets = sum(one.nbytes for one in engine.training.model.parameters() if one.requires_grad)
    del engine
    gc.collect()  # free reference cycles before the next size is measured
    if not is_counted:
        return live.peak_bytes + buckets
    peak = int(torch.accelerator.max_memory_allocated(world.device))
    torch.accelerator.empty_cache()
    return peak + buckets
