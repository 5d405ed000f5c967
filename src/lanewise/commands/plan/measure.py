"""Measures one lane of a run for the formulas, on fake tensors where that is possible."""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lanewise.commands.plan.memory import Measured
from lanewise.commands.plan.model import weights_of, with_tensors
from lanewise.commands.plan.real_sizes import RealSizes
from lanewise.commands.plan.record import count_flops, record_memory
from lanewise.commands.plan.update import measure_update
from lanewise.config import RunConfig
from lanewise.data import LaneBatch, LaneSource
from lanewise.engine.precision import Precision
from lanewise.engine.run.build import build_model, build_run_loader, build_task, transform
from lanewise.engine.step.lanes import LaneRunner, TaskLane
from lanewise.engine.transforms import compare_runs
from lanewise.errors import ConfigError, LanewiseError, text_of
from lanewise.lanes import Placement
from lanewise.processes.device.nested import copied, map_leaves, tensors_in
from lanewise.processes.world.world import LocalWorld
from lanewise.reduce import find_blocks
from lanewise.reduce.blocks import repeated_blocks
from lanewise.task import Task

_NUM_BATCHES = 16
_CPU = torch.device("cpu")


def largest_batch(config: RunConfig, task: Task | None = None) -> LaneBatch:
    """Return the micro-batch with most bytes of the first ones of the run, up to 16.

    Raises:
        ConfigError: if a class in the configuration is not what its section needs.
        DataError: if the dataset is empty.
        TaskError: if it is not map-style.
    """
    alone = replace(config, data=replace(config.data, num_workers=0))
    world = LocalWorld(_CPU)
    placement = Placement.of(config.batch.num_lanes, world)
    loader = build_run_loader(alone, build_task(alone, task), world, placement)
    num_steps = -(-_NUM_BATCHES // config.batch.num_lanes)
    batches = islice(_noted(loader, loader.batches(0, num_steps)), _NUM_BATCHES)
    return max(batches, key=lambda batch: sum(tensor.nbytes for tensor in tensors_in(batch.data)))


def _noted(loader: LaneSource, batches: Iterator[LaneBatch]) -> Iterator[LaneBatch]:
    """Yield the batches of a single process; they themselves tell a stream what a step's totals would."""
    for batch in batches:
        yield batch
        if batch.to_source is not None:
            batch.to_source.receive(batch.to_source.numbers)
        if loader.is_over:
            break


def measure(config: RunConfig, batch: LaneBatch, device_type: str, task: Task | None = None) -> Measured:
    """Run one lane on fake tensors; on real ones if the user's code needs their values.

    Args:
        config: the run.
        batch: what the lane gets.
        device_type: where the run will be.
        task: what the user gave as an object; None: the configuration names it.

    Raises:
        LanewiseError: if the lane cannot be trained.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            return _measure(config, batch, device_type, task, FakeTensorMode(allow_non_fake_inputs=True))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever code may raise to which values matter
            why_real = f"{type(error).__name__}: {text_of(error)}".splitlines()[0]
    return replace(_measure(config, batch, device_type, task, None), why_real=why_real)


def _measure(
    config: RunConfig, batch: LaneBatch, device_type: str, own_task: Task | None, mode: FakeTensorMode | None
) -> Measured:
    task = build_task(config, own_task)
    model = _build_model(config, task, mode)
    repeats_blocks = bool(repeated_blocks(model))
    fsdp, blocks, why_no_fsdp = config.distributed.fsdp, list[nn.Module](), ""
    try:
        blocks = find_blocks(model, fsdp.blocks)
    except LanewiseError as error:
        why_no_fsdp = text_of(error)
    before = _buffers_of(model)
    with mode or nullcontext():
        fresh = [_lane(config, task, replace(batch, data=_data_for(mode, batch.data))) for _ in range(2)]
        with RealSizes() as real_sizes:
            memory = record_memory(model, fresh[0], blocks)
        num_flops = count_flops(model, fresh[1])
    return Measured(
        weights=weights_of(model, blocks),
        memory=memory,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        changed_buffer_bytes=_changed_bytes(model, before),
        num_buffers=len(before),
        update=lru_cache(partial(measure_update, config, task, model, mode, device_type)),
        shards_optimizer=config.distributed.shard_optimizer,
        has_average=config.train.ema_decay is not None,
        equality=config.distributed.equality,
        shares_memory=device_type == "cpu",
        gathered_itemsize_factor=0.5 if fsdp.param_dtype == "bf16" else 1.0,
        offloads=fsdp.cpu_offload,
        num_flops=num_flops,
        repeats_blocks=repeats_blocks,
        why_no_fsdp=why_no_fsdp,
        not_counted=sorted(real_sizes.not_counted),
    )


def _build_model(config: RunConfig, task: Task, mode: FakeTensorMode | None) -> nn.Module:
    """Build the model; if there is a mode without memory for its tensors, where the user's code allows it."""
    seed = config.train.seed
    if mode is None:
        return _transformed(build_model(task, seed), config)
    try:
        with mode:
            model = build_model(task, seed)
    except Exception:  # noqa: BLE001 - it reads weights from a file, say
        model = build_model(task, seed)
    with mode:  # all are made anew: a fake tensor that was copied by deepcopy has several storages
        model = with_tensors(
            model, lambda tensor: torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        )
        return _transformed(model, config)


def _transformed(model: nn.Module, config: RunConfig) -> nn.Module:
    """Return the model as a run has it after its first step, when blocks no longer compare their two runs."""
    model = transform(model, config, _CPU)
    compare_runs([model], is_on=False)
    return model


def _data_for(mode: FakeTensorMode | None, data: Any) -> Any:
    """Return a copy of a batch, fake if there is a mode: a forward may change it."""
    if mode is None:
        return copied(data)
    return map_leaves(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, data)


def _lane(config: RunConfig, task: Task, batch: LaneBatch) -> TaskLane:
    return LaneRunner(task, Precision(config.precision, "cpu"), config.train.seed).lane(batch)


def _buffers_of(model: nn.Module) -> dict[tuple[nn.Module, str], tuple[torch.Tensor, int]]:
    """Return every buffer with its version, by its place."""
    return {
        (module, name): (buffer, buffer._version)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    }


def _changed_bytes(model: nn.Module, before: dict[tuple[nn.Module, str], tuple[torch.Tensor, int]]) -> int:
    """Return the bytes of the buffers that a forward changed."""
    total = 0
    for (module, name), (buffer, version) in _buffers_of(model).items():
        earlier, earlier_version = before.get((module, name), (None, 0))
        # The kernel of batch_norm writes its statistics without a new version.
        is_statistic = isinstance(module, nn.modules.batchnorm._NormBase) and module.training  # noqa: SLF001
        if is_statistic or earlier is not buffer or earlier_version != version:
            total += buffer.nbytes
    return total
